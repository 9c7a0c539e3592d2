#if canImport(CoreAI)
    import CoreAI
    import SpeculativeStreaming

    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    extension NDArray {
        /// A contiguous array of zeros: Core AI does not promise them.
        static func zeros(_ shape: [Int], _ number: InputNumber) -> NDArray {
            let size = number == .int32 ? 4 : 2
            var array = NDArray(shape: shape, scalarType: number == .int32 ? .int32 : .float16)
            array.mutableRawView().withUnsafeMutableBytes { bytes, _, _ in
                _ = bytes.initializeMemory(as: UInt8.self, repeating: 0, count: shape.reduce(size, *))
            }
            return array
        }

        /// An array of zeros in the layout that a function prefers.
        static func zeros(_ descriptor: NDArrayDescriptor) -> NDArray {
            let count = descriptor.minimumByteCount
            var array = NDArray(descriptor: descriptor)
            array.mutableRawView().withUnsafeMutableBytes { bytes, _, _ in
                _ = bytes.initializeMemory(as: UInt8.self, repeating: 0, count: count)
            }
            return array
        }

        /// All numbers of an integer array that a function put out, which is contiguous.
        func readIntegers() throws -> [Int] {
            guard scalarType == .int32 else { throw unexpectedType }
            let count = shape.reduce(1, *)
            return rawView().withUnsafeBytes { bytes, _, _ in
                (0..<count).map { Int(bytes.load(fromByteOffset: 4 * $0, as: Int32.self)) }
            }
        }

        /// The first `rows` rows of an fp16 matrix that a function put out, as float32; nil reads all of them.
        ///
        /// - Parameter block: of an array of matrices the one to read.
        func readLogits(rows: Int?, block: Int) throws -> LogitRows {
            guard scalarType == .float16, shape.count >= 2 else { throw unexpectedType }
            let (height, width) = (shape[shape.count - 2], shape[shape.count - 1])
            let count = min(rows ?? height, height)
            let values = rawView().withUnsafeBytes { bytes, _, _ in
                let start = (bytes + 2 * block * height * width).assumingMemoryBound(to: UInt16.self)
                return [Float](unsafeUninitializedCapacity: count * width) { target, filled in
                    let target = UnsafeMutableBufferPointer(rebasing: target[..<(count * width)])
                    Half.convert(UnsafeBufferPointer(start: start, count: count * width), into: target)
                    filled = count * width
                }
            }
            return LogitRows(rows: count, vocabulary: width, values: values)
        }

        private var unexpectedType: SpeculativeError {
            .backEnd("Core AI returned an array of another number type or shape than the bundle describes")
        }
    }

    /// An input in a contiguous array.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    package struct ArrayInput: InputArray {
        package private(set) var array: NDArray

        package init(zeros shape: [Int], _ number: InputNumber) { array = .zeros(shape, number) }

        package mutating func write(_ values: [Int32]) {
            array.mutableRawView().withUnsafeMutableBytes { bytes, _, _ in
                for (index, value) in values.enumerated() {
                    bytes.storeBytes(of: value, toByteOffset: 4 * index, as: Int32.self)
                }
            }
        }

        package mutating func writeHalfRows(
            _ body: (_ row: Int, _ columns: UnsafeMutableBufferPointer<UInt16>) -> Void
        ) {
            let (rows, width) = (array.shape[0], array.shape[1])
            array.mutableRawView().withUnsafeMutableBytes { bytes, _, _ in
                let all = bytes.assumingMemoryBound(to: UInt16.self)
                for row in 0..<rows {
                    body(row, UnsafeMutableBufferPointer(start: all + row * width, count: width))
                }
            }
        }
    }
#endif
