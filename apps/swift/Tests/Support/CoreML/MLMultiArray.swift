import Foundation
import ModelServer

public enum MLMultiArrayDataType: Int, Sendable {
    case double = 65600
    case float32 = 65568
    case float16 = 65552
    case int32 = 131104

    var size: Int {
        switch self {
        case .double: return 8
        case .float32, .int32: return 4
        case .float16: return 2
        }
    }

    /// The name that the executor uses.
    var name: String {
        switch self {
        case .double: return "float64"
        case .float32: return "float32"
        case .float16: return "float16"
        case .int32: return "int32"
        }
    }

    init?(name: String) {
        guard let found = [Self.double, .float32, .float16, .int32].first(where: { $0.name == name }) else {
            return nil
        }
        self = found
    }
}

/// A multidimensional array. Rows are padded to a multiple of 64 bytes on purpose: Core ML may do so too, and
/// whoever ignores `strides` must fail here already.
public final class MLMultiArray {
    public let shape: [NSNumber]
    public let strides: [NSNumber]
    public let dataType: MLMultiArrayDataType
    private let storage: UnsafeMutableRawBufferPointer

    public init(shape: [NSNumber], dataType: MLMultiArrayDataType) throws {
        let extents = shape.map(\.intValue)
        guard !extents.isEmpty, extents.allSatisfy({ $0 > 0 }) else {
            throw StandInError("a multi array needs extents above 0, not \(extents)")
        }
        let rowAlignment = 64 / dataType.size
        var strides = [Int](repeating: 1, count: extents.count)
        for axis in extents.indices.dropLast().reversed() {
            let inner = strides[axis + 1] * extents[axis + 1]
            let isRow = axis == extents.count - 2
            strides[axis] = isRow ? (inner + rowAlignment - 1) / rowAlignment * rowAlignment : inner
        }
        self.shape = shape
        self.strides = strides.map { NSNumber(value: $0) }
        self.dataType = dataType
        let bytes = strides[0] * extents[0] * dataType.size
        storage = .allocate(byteCount: bytes, alignment: 64)
        // Core ML promises no particular content; a pattern shows who relies on zeros.
        storage.initializeMemory(as: UInt8.self, repeating: 0x7b)
    }

    deinit { storage.deallocate() }

    public var count: Int { shape.reduce(1) { $0 * $1.intValue } }

    public func withUnsafeBytes<R>(_ body: (UnsafeRawBufferPointer) throws -> R) rethrows -> R {
        try body(UnsafeRawBufferPointer(storage))
    }

    public func withUnsafeMutableBytes<R>(
        _ body: (UnsafeMutableRawBufferPointer, [Int]) throws -> R
    ) rethrows -> R {
        try body(storage, strides.map(\.intValue))
    }

    /// The numbers without padding, row-major.
    var packed: Data {
        var data = Data(capacity: count * dataType.size)
        forEachRow { row in data.append(contentsOf: UnsafeRawBufferPointer(row)) }
        return data
    }

    /// Replaces all numbers by `data`, row-major without padding.
    func unpack(_ data: Data) throws {
        guard data.count == count * dataType.size else {
            throw StandInError("\(data.count) bytes for an array of \(count * dataType.size)")
        }
        var place = data.startIndex
        forEachRow { row in
            row.copyBytes(from: data[place..<place + row.count])
            place += row.count
        }
    }

    private func forEachRow(_ body: (UnsafeMutableRawBufferPointer) -> Void) {
        let row = (shape.last?.intValue ?? 0) * dataType.size
        let rows = count * dataType.size / row
        let stride = shape.count < 2 ? row : strides[shape.count - 2].intValue * dataType.size
        for index in 0..<rows {
            body(UnsafeMutableRawBufferPointer(rebasing: storage[index * stride..<index * stride + row]))
        }
    }
}

public final class MLFeatureValue {
    public let multiArrayValue: MLMultiArray?

    public init(multiArray value: MLMultiArray) { multiArrayValue = value }
}

public protocol MLFeatureProvider {
    var featureNames: Set<String> { get }
    func featureValue(for featureName: String) -> MLFeatureValue?
}

public final class MLDictionaryFeatureProvider: MLFeatureProvider {
    public let dictionary: [String: MLFeatureValue]

    public init(dictionary: [String: Any]) throws {
        self.dictionary = try dictionary.mapValues { value in
            if let value = value as? MLFeatureValue { return value }
            guard let array = value as? MLMultiArray else {
                throw StandInError("a feature must be a multi array, not \(type(of: value))")
            }
            return MLFeatureValue(multiArray: array)
        }
    }

    public var featureNames: Set<String> { Set(dictionary.keys) }

    public func featureValue(for featureName: String) -> MLFeatureValue? { dictionary[featureName] }
}
