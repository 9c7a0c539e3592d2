import Foundation

#if canImport(CryptoKit)
    import CryptoKit
#endif

/// Hex SHA-256 of a file, read in pieces.
func sha256(of url: URL) throws -> String {
    guard let handle = try? FileHandle(forReadingFrom: url) else {
        throw SpeculativeError.missingFile(path: url.path)
    }
    defer { try? handle.close() }
    var digest = Digest()
    while let piece = try handle.read(upToCount: 1 << 20), !piece.isEmpty { digest.update(piece) }
    return digest.hex()
}

/// Hex SHA-256 of bytes.
public func sha256(of data: Data) -> String {
    var digest = Digest()
    digest.update(data)
    return digest.hex()
}

#if canImport(CryptoKit)
    /// SHA-256 of bytes that arrive in pieces.
    struct Digest {
        private var hash = SHA256()

        mutating func update(_ data: Data) { hash.update(data: data) }

        mutating func hex() -> String { hash.finalize().map { String(format: "%02x", $0) }.joined() }
    }
#else
    /// SHA-256 of bytes that arrive in pieces (FIPS 180-4), for platforms without CryptoKit.
    struct Digest {
        private var state: [UInt32] = [
            0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19,
        ]
        private var pending: [UInt8] = []
        private var length: UInt64 = 0
        private var schedule = [UInt32](repeating: 0, count: 64)

        mutating func update(_ data: Data) {
            length += UInt64(data.count)
            pending.append(contentsOf: data)
            let whole = pending.count / 64 * 64
            pending.withUnsafeBufferPointer { bytes in
                var start = 0
                while start < whole {
                    Self.compress(&state, &schedule, UnsafeBufferPointer(rebasing: bytes[start..<start + 64]))
                    start += 64
                }
            }
            pending.removeFirst(whole)
        }

        mutating func hex() -> String {
            let bits = length * 8
            var padding: [UInt8] = [0x80]
            padding += [UInt8](repeating: 0, count: (119 - pending.count % 64) % 64)
            for shift in stride(from: 56, through: 0, by: -8) { padding.append(UInt8(truncatingIfNeeded: bits >> shift)) }
            update(Data(padding))
            return state.map { String(format: "%08x", $0) }.joined()
        }

        private static func compress(
            _ state: inout [UInt32], _ w: inout [UInt32], _ block: UnsafeBufferPointer<UInt8>
        ) {
            for index in 0..<16 {
                let at = 4 * index
                w[index] = UInt32(block[at]) << 24 | UInt32(block[at + 1]) << 16
                    | UInt32(block[at + 2]) << 8 | UInt32(block[at + 3])
            }
            for index in 16..<64 {
                let (early, late) = (w[index - 15], w[index - 2])
                let low = rotated(early, 7) ^ rotated(early, 18) ^ (early >> 3)
                let high = rotated(late, 17) ^ rotated(late, 19) ^ (late >> 10)
                w[index] = w[index - 16] &+ low &+ w[index - 7] &+ high
            }
            var (a, b, c, d) = (state[0], state[1], state[2], state[3])
            var (e, f, g, h) = (state[4], state[5], state[6], state[7])
            for index in 0..<64 {
                let mixed = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)
                let first = h &+ mixed &+ ((e & f) ^ (~e & g)) &+ roundConstants[index] &+ w[index]
                let second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) &+ ((a & b) ^ (a & c) ^ (b & c))
                (h, g, f, e) = (g, f, e, d &+ first)
                (d, c, b, a) = (c, b, a, first &+ second)
            }
            for (index, value) in [a, b, c, d, e, f, g, h].enumerated() { state[index] = state[index] &+ value }
        }

        private static func rotated(_ value: UInt32, _ count: UInt32) -> UInt32 {
            value >> count | value << (32 - count)
        }

        /// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
        private static let roundConstants: [UInt32] = [
            0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1,
            0x923f_82a4, 0xab1c_5ed5, 0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3,
            0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174, 0xe49b_69c1, 0xefbe_4786,
            0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
            0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147,
            0x06ca_6351, 0x1429_2967, 0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13,
            0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85, 0xa2bf_e8a1, 0xa81a_664b,
            0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
            0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a,
            0x5b9c_ca4f, 0x682e_6ff3, 0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208,
            0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
        ]
    }
#endif
