import Foundation

/// Reads tensors of a safetensors file: 8 bytes of header length, a JSON header, the numbers.
public struct TensorFile {
    private struct Entry: Decodable {
        let dtype: String
        let shape: [Int]
        let dataOffsets: [Int]

        enum CodingKeys: String, CodingKey {
            case dtype, shape
            case dataOffsets = "data_offsets"
        }
    }

    private let path: String
    private let data: Data
    private let start: Int
    private var entries: [String: Entry] = [:]

    /// Throws `missingFile`, or `damagedFile` when the header does not describe the file.
    public init(contentsOf url: URL) throws {
        path = url.path
        guard let data = try? Data(contentsOf: url, options: .mappedIfSafe) else {
            throw SpeculativeError.missingFile(path: url.path)
        }
        self.data = data
        let damaged = SpeculativeError.damagedFile(path: path, reason: "not a readable safetensors file")
        guard data.count >= 8 else { throw damaged }
        let length = data.withUnsafeBytes { UInt64(littleEndian: $0.loadUnaligned(as: UInt64.self)) }
        guard length <= UInt64(data.count - 8) else { throw damaged }
        start = 8 + Int(length)
        guard let header = try? JSONDecoder().decode([String: Header].self, from: data[8..<start]) else {
            throw damaged
        }
        for case (let name, .tensor(let entry)) in header {
            let offsets = entry.dataOffsets
            guard offsets.count == 2, offsets[0] >= 0, offsets[0] <= offsets[1], start + offsets[1] <= data.count
            else { throw damaged }
            entries[name] = entry
        }
    }

    public var names: [String] { entries.keys.sorted() }

    /// Shape of a tensor. Throws `damagedFile` when there is none of that name.
    public func shape(_ name: String) throws -> [Int] { try entry(name).shape }

    /// Numbers of an F32 or F16 tensor, row-major.
    public func floats(_ name: String) throws -> [Float] {
        switch try entry(name).dtype {
        case "F32": return try numbers(name, UInt32.self).map { Float(bitPattern: UInt32(littleEndian: $0)) }
        case "F16": return try numbers(name, UInt16.self).map { Half.float(UInt16(littleEndian: $0)) }
        default: throw wrongType(name)
        }
    }

    /// Numbers of an F64 tensor, row-major.
    public func doubles(_ name: String) throws -> [Double] {
        guard try entry(name).dtype == "F64" else { throw wrongType(name) }
        return try numbers(name, UInt64.self).map { Double(bitPattern: UInt64(littleEndian: $0)) }
    }

    /// Numbers of an integer tensor, row-major.
    public func integers(_ name: String) throws -> [Int] {
        switch try entry(name).dtype {
        case "I32": return try numbers(name, Int32.self).map { Int(Int32(littleEndian: $0)) }
        case "I16": return try numbers(name, Int16.self).map { Int(Int16(littleEndian: $0)) }
        case "I64": return try numbers(name, Int64.self).map { Int(Int64(littleEndian: $0)) }
        case "U8": return try numbers(name, UInt8.self).map(Int.init)
        default: throw wrongType(name)
        }
    }

    /// A header's entry: a tensor, or the file's own metadata.
    private enum Header: Decodable {
        case tensor(Entry)
        case metadata

        init(from decoder: Decoder) throws {
            self = (try? Entry(from: decoder)).map(Header.tensor) ?? .metadata
        }
    }

    private func entry(_ name: String) throws -> Entry {
        guard let entry = entries[name] else {
            throw SpeculativeError.damagedFile(path: path, reason: "no tensor '\(name)'")
        }
        return entry
    }

    private func wrongType(_ name: String) -> SpeculativeError {
        .damagedFile(path: path, reason: "tensor '\(name)' has another number type than expected")
    }

    private func numbers<Number: BitwiseCopyable>(_ name: String, _: Number.Type) throws -> [Number] {
        let entry = try entry(name)
        let count = entry.shape.reduce(1, *)
        guard count * MemoryLayout<Number>.size == entry.dataOffsets[1] - entry.dataOffsets[0] else {
            throw SpeculativeError.damagedFile(path: path, reason: "tensor '\(name)' does not fit its shape")
        }
        return data.withUnsafeBytes { bytes in
            [Number](unsafeUninitializedCapacity: count) { target, filled in
                let source = bytes[(start + entry.dataOffsets[0])..<(start + entry.dataOffsets[1])]
                UnsafeMutableRawBufferPointer(target).copyMemory(from: UnsafeRawBufferPointer(rebasing: source))
                filled = count
            }
        }
    }
}
