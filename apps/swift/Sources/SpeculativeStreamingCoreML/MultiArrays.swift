#if canImport(CoreML)
    import CoreML
    import Foundation
    import SpeculativeStreaming

    #if canImport(CoreVideo)
        import CoreVideo
    #endif

    /// An input in a multi array, written through its strides.
    package struct MultiArrayInput: InputArray {
        package let array: MLMultiArray

        package init(zeros shape: [Int], _ number: InputNumber) throws {
            array = try .zeros(shape, number == .int32 ? .int32 : .float16)
        }

        package func write(_ values: [Int32]) { array.write(values) }

        package func writeHalfRows(_ body: (_ row: Int, _ columns: UnsafeMutableBufferPointer<UInt16>) -> Void) {
            array.writeHalfRows(body)
        }
    }

    extension StepInputs<MultiArrayInput> {
        /// The inputs as Core ML takes them; their memory stays the same.
        package var features: any MLFeatureProvider {
            get throws { try MLDictionaryFeatureProvider(dictionary: arrays.mapValues(\.array)) }
        }
    }

    extension PrefillInputs<MultiArrayInput> {
        /// The inputs as Core ML takes them; their memory stays the same.
        var features: any MLFeatureProvider {
            get throws { try MLDictionaryFeatureProvider(dictionary: arrays.mapValues(\.array)) }
        }
    }

    extension MLMultiArray {
        /// An array of zeros.
        static func zeros(_ shape: [Int], _ type: MLMultiArrayDataType) throws -> MLMultiArray {
            let array = try MLMultiArray(shape: shape.map { NSNumber(value: $0) }, dataType: type)
            array.withUnsafeMutableBytes { bytes, _ in
                bytes.initializeMemory(as: UInt8.self, repeating: 0)
                return
            }
            return array
        }

        /// Memory for an fp16 output. On Apple platforms it lies in an IOSurface, which the Neural Engine and the
        /// GPU write to without a copy.
        static func halfOutput(_ shape: [Int]) throws -> MLMultiArray {
            #if canImport(CoreVideo)
                let width = shape[shape.count - 1]
                var buffer: CVPixelBuffer?
                let attributes = [kCVPixelBufferIOSurfacePropertiesKey: [:] as CFDictionary] as CFDictionary
                CVPixelBufferCreate(
                    kCFAllocatorDefault, width, shape.reduce(1, *) / width, kCVPixelFormatType_OneComponent16Half,
                    attributes, &buffer)
                // A width beyond what pixel buffers take leaves ordinary memory, which costs a copy.
                if let buffer { return MLMultiArray(pixelBuffer: buffer, shape: shape.map { NSNumber(value: $0) }) }
            #endif
            return try zeros(shape, .float16)
        }

        /// Extents and steps of a matrix; a vector is one row. Leading axes of extent 1 are dropped.
        private var rowLayout: (rows: Int, columns: Int, rowStride: Int, columnStride: Int) {
            let (extents, steps) = (shape.map(\.intValue), strides.map(\.intValue))
            let last = extents.count - 1
            guard last > 0 else { return (1, extents[0], 0, steps[0]) }
            return (extents[last - 1], extents[last], steps[last - 1], steps[last])
        }

        /// Writes a vector or the one row of a [1, n] array through its strides.
        func write(_ values: [Int32]) {
            let step = rowLayout.columnStride
            withUnsafeMutableBytes { bytes, _ in
                for (index, value) in values.enumerated() {
                    bytes.storeBytes(of: value, toByteOffset: 4 * index * step, as: Int32.self)
                }
            }
        }

        /// Calls `body` once per row of an fp16 matrix with its columns.
        func writeHalfRows(_ body: (_ row: Int, _ columns: UnsafeMutableBufferPointer<UInt16>) -> Void) {
            let layout = rowLayout
            precondition(dataType == .float16 && layout.columnStride == 1, "rows of a mask must be contiguous")
            withUnsafeMutableBytes { bytes, _ in
                for row in 0..<layout.rows {
                    let start = 2 * row * layout.rowStride
                    let columns = UnsafeMutableRawBufferPointer(rebasing: bytes[start..<start + 2 * layout.columns])
                    body(row, columns.bindMemory(to: UInt16.self))
                }
            }
        }

        /// All numbers of an integer array, row-major.
        func readIntegers() throws -> [Int] {
            guard dataType == .int32 else { throw unexpectedType }
            let layout = rowLayout
            return withUnsafeBytes { bytes in
                (0..<layout.rows * layout.columns).map { index in
                    let (row, column) = index.quotientAndRemainder(dividingBy: layout.columns)
                    let offset = 4 * (row * layout.rowStride + column * layout.columnStride)
                    return Int(bytes.loadUnaligned(fromByteOffset: offset, as: Int32.self))
                }
            }
        }

        /// The first `rows` rows of a matrix as float32; nil reads all of them.
        ///
        /// - Parameter block: of an array of matrices the one to read.
        func readLogits(rows: Int? = nil, block: Int = 0) throws -> LogitRows {
            let layout = rowLayout
            let first = block == 0 ? 0 : block * strides[strides.count - 3].intValue
            let rows = min(rows ?? layout.rows, layout.rows)
            guard layout.columnStride == 1, dataType == .float16 || dataType == .float32 else { throw unexpectedType }
            let type = dataType
            let values = withUnsafeBytes { bytes in
                [Float](unsafeUninitializedCapacity: rows * layout.columns) { target, filled in
                    for row in 0..<rows {
                        let part = row * layout.columns..<(row + 1) * layout.columns
                        let columns = UnsafeMutableBufferPointer(rebasing: target[part])
                        let size = type == .float16 ? 2 : 4
                        let start = size * (first + row * layout.rowStride)
                        let source = UnsafeRawBufferPointer(
                            rebasing: bytes[start..<start + size * layout.columns])
                        if type == .float16 {
                            Half.convert(source.bindMemory(to: UInt16.self), into: columns)
                        } else {
                            UnsafeMutableRawBufferPointer(columns).copyMemory(from: source)
                        }
                    }
                    filled = rows * layout.columns
                }
            }
            return LogitRows(rows: rows, vocabulary: layout.columns, values: values)
        }

        private var unexpectedType: SpeculativeError {
            .backEnd("Core ML returned an array of another number type or layout than the bundle describes")
        }
    }
#endif
