import Foundation
import ModelServer

/// Extents or steps as Apple's closures get them. Swift 6.0 has no `Span`.
public struct Span<Element> {
    private let elements: [Element]

    init(_ elements: [Element]) { self.elements = elements }

    public var count: Int { elements.count }
    public subscript(index: Int) -> Element { elements[index] }
}

public struct NDArrayDescriptor: Sendable, Equatable {
    public let scalarType: NDArray.ScalarType
    public let shape: [Int]

    init(_ array: ServedArray) throws {
        scalarType = try NDArray.ScalarType(served: array)
        shape = array.shape
    }

    public var rank: Int { shape.count }
    public var hasDynamicShape: Bool { shape.contains { $0 < 0 } }

    /// Rows are padded to a multiple of 64 bytes on purpose: an array made from a descriptor need not be
    /// contiguous, and whoever relies on it must fail here already.
    public var preferredStrides: [Int] {
        let aligned = 64 / scalarType.size
        var strides = [Int](repeating: 1, count: rank)
        for axis in shape.indices.dropLast().reversed() {
            let inner = strides[axis + 1] * shape[axis + 1]
            strides[axis] = axis == rank - 2 ? (inner + aligned - 1) / aligned * aligned : inner
        }
        return strides
    }

    public var minimumByteCount: Int { (preferredStrides.first ?? 1) * (shape.first ?? 1) * scalarType.size }
}

public struct InferenceValue: ~Copyable {
    let array: NDArray

    public var ndArray: NDArray? { consuming get { array } }

    public enum Descriptor: Sendable {
        case ndArray(NDArrayDescriptor)
    }

    public struct MutableView: ~Copyable {
        let memory: NDArray.Memory
    }

    public protocol MutableViewRepresentable: ~Copyable {
        mutating func mutableView() -> MutableView
    }
}

/// A multidimensional array with value semantics: memory that two arrays share is copied before it is changed.
public struct NDArray: @unchecked Sendable {
    public enum ScalarType: Hashable, Sendable, CaseIterable {
        case int32, float16, float32

        init(served array: ServedArray) throws {
            guard let found = Self.allCases.first(where: { $0.name == array.dtype }) else {
                throw StandInError("'\(array.name)' has type \(array.dtype)")
            }
            self = found
        }

        var name: String { "\(self)" }
        var size: Int { self == .float16 ? 2 : 4 }
    }

    final class Memory {
        let shape: [Int]
        let strides: [Int]
        let scalarType: ScalarType
        let bytes: UnsafeMutableRawBufferPointer

        init(_ shape: [Int], _ strides: [Int], _ scalarType: ScalarType) {
            (self.shape, self.strides, self.scalarType) = (shape, strides, scalarType)
            bytes = .allocate(byteCount: strides[0] * shape[0] * scalarType.size, alignment: 64)
            // No particular content is promised; a pattern shows who relies on zeros.
            bytes.initializeMemory(as: UInt8.self, repeating: 0x7b)
        }

        convenience init(copying other: Memory) {
            self.init(other.shape, other.strides, other.scalarType)
            bytes.copyMemory(from: UnsafeRawBufferPointer(other.bytes))
        }

        deinit { bytes.deallocate() }

        /// The numbers without padding, row-major.
        var packed: Data { rows.reduce(into: Data()) { $0.append(contentsOf: bytes[$1]) } }

        /// Replaces all numbers by `data`, row-major without padding.
        func unpack(_ data: Data) throws {
            guard data.count == rows.reduce(0, { $0 + $1.count }) else {
                throw StandInError("\(data.count) bytes for an array of another size")
            }
            var place = data.startIndex
            for row in rows {
                UnsafeMutableRawBufferPointer(rebasing: bytes[row]).copyBytes(from: data[place..<place + row.count])
                place += row.count
            }
        }

        /// Places of the rows' bytes.
        private var rows: [Range<Int>] {
            let row = shape[shape.count - 1] * scalarType.size
            let step = shape.count < 2 ? row : strides[shape.count - 2] * scalarType.size
            return (0..<shape.reduce(scalarType.size, *) / row).map { $0 * step..<$0 * step + row }
        }
    }

    private(set) var memory: Memory

    public var shape: [Int] { memory.shape }
    public var strides: [Int] { memory.strides }
    public var scalarType: ScalarType { memory.scalarType }

    public init(descriptor: consuming NDArrayDescriptor) {
        precondition(!descriptor.hasDynamicShape, "a dynamic shape has to be resolved first")
        memory = Memory(descriptor.shape, descriptor.preferredStrides, descriptor.scalarType)
    }

    public init(shape: [Int], scalarType: ScalarType) {
        var strides = [Int](repeating: 1, count: shape.count)
        for axis in shape.indices.dropLast().reversed() { strides[axis] = strides[axis + 1] * shape[axis + 1] }
        memory = Memory(shape, strides, scalarType)
    }

    public func rawView() -> RawView { RawView(memory: memory) }

    public mutating func mutableRawView() -> MutableRawView { MutableRawView(memory: own()) }

    fileprivate mutating func own() -> Memory {
        if !isKnownUniquelyReferenced(&memory) { memory = Memory(copying: memory) }
        return memory
    }

    public struct RawView {
        fileprivate let memory: Memory

        public var scalarType: ScalarType { memory.scalarType }

        public func withUnsafeBytes<R, E>(
            _ body: (UnsafeRawPointer, _ shape: Span<Int>, _ strides: Span<Int>) throws(E) -> R
        ) throws(E) -> R {
            try body(UnsafeRawPointer(memory.bytes.baseAddress!), Span(memory.shape), Span(memory.strides))
        }
    }

    public struct MutableRawView: ~Copyable {
        fileprivate let memory: Memory

        public consuming func withUnsafeMutableBytes<R, E>(
            _ body: (UnsafeMutableRawPointer, _ shape: Span<Int>, _ strides: Span<Int>) throws(E) -> R
        ) throws(E) -> R {
            try body(memory.bytes.baseAddress!, Span(memory.shape), Span(memory.strides))
        }
    }
}

extension NDArray: InferenceValue.MutableViewRepresentable {
    public mutating func mutableView() -> InferenceValue.MutableView { InferenceValue.MutableView(memory: own()) }
}
