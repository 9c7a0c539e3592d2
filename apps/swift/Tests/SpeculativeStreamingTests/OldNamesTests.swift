import Foundation
import Testing

@testable import SpeculativeStreaming

/// Bundles that were written with the names of earlier versions say the same as with today's.
@Suite struct OldNamesTests {
    private static let (vocabulary, rank) = (6, 2)
    /// u and v [V, rank]; halves, so that float16 holds them.
    private static let u = (0..<vocabulary * rank).map { Float($0) / 2 - 3 }
    private static let v = (0..<vocabulary * rank).map { 1 - Float($0 * $0 % 5) / 2 }

    /// rankEntry, fileEntry: of the manifest's adapter.
    private func manifest(rankEntry: String, fileEntry: String = "\"golden\": null") -> String {
        """
        {"format_version": 1, "architecture": {"family": "llama", "vocab_size": 6, "bos_id": 1, "eos_ids": [2, 5]},
         "adapters": {"my_app": {"app": "my_app", "config": {"mode": "shared", "num_streams": 3,
           "main_attends_streams": true, \(rankEntry)}, "prompt_template": "{a}", "stop_strings": ["x"],
           "max_tokens": 40, "num_nodes": 8, "tensor_file": "own.safetensors", \(fileEntry)}},
         "files": {}}
        """
    }

    private func bundle(_ manifest: String, _ tensors: [String: Data] = [:]) throws -> (SpeculativeBundle, Folder) {
        let folder = try Folder(["manifest.json": manifest])
        for (name, data) in tensors { try data.write(to: folder.url.appendingPathComponent(name)) }
        return (try SpeculativeBundle(contentsOf: folder.url), folder)
    }

    /// A safetensors file of float32 or float16 [V, rank] tensors: 8 bytes length of the JSON header, the header,
    /// the numbers.
    private func tensorFile(_ tensors: [(name: String, values: [Float])], half: Bool = false) -> Data {
        var (entries, numbers) = ([String](), Data())
        for (name, values) in tensors {
            let start = numbers.count
            for value in values {
                let bytes = half ? Half.bits(value).littleEndianBytes : value.bitPattern.littleEndianBytes
                numbers.append(contentsOf: bytes)
            }
            entries.append(
                "\"\(name)\": {\"dtype\": \"\(half ? "F16" : "F32")\", \"shape\": [\(Self.vocabulary), \(Self.rank)], "
                    + "\"data_offsets\": [\(start), \(numbers.count)]}")
        }
        let header = Data("{\(entries.joined(separator: ", "))}".utf8)
        return Data(UInt64(header.count).littleEndianBytes) + header + numbers
    }

    /// What a bias adds to the logits of every parent's children: [V · V].
    private func added(_ bias: BigramBias) -> [Float] {
        let zeros = LogitRows(rows: 1, vocabulary: bias.vocabulary, values: Array(repeating: 0, count: bias.vocabulary))
        return (0..<bias.vocabulary).flatMap { parent in
            var sums = [Float](repeating: .nan, count: bias.vocabulary)
            sums.withUnsafeMutableBufferPointer { sums in
                zeros.withRow(0) { bias.add(to: $0, parent: parent, into: sums) }
            }
            return sums
        }
    }

    private var product: [Float] {
        (0..<Self.vocabulary).flatMap { parent in
            (0..<Self.vocabulary).map { child in
                (0..<Self.rank).reduce(0) { $0 + Self.u[parent * Self.rank + $1] * Self.v[child * Self.rank + $1] }
            }
        }
    }

    @Test func aManifestUnderOldNamesSaysTheSame() throws {
        let (new, _) = try bundle(
            manifest(rankEntry: "\"bigram_rank\": 2", fileEntry: "\"bigram_bias_file\": \"mlx/shared.safetensors\""))
        let (old, _) = try bundle(
            manifest(rankEntry: "\"markov_rank\": 2", fileEntry: "\"parent_bias_file\": \"mlx/shared.safetensors\""))
        #expect(new.manifest == old.manifest)
        let adapter = try old.adapter("my_app")
        #expect(adapter.config.bigramRank == 2)
        #expect(adapter.bigramBiasFile == "mlx/shared.safetensors")
        #expect(adapter.config.mainAttendsStreams)
        #expect(adapter.numNodes == 8)
        #expect(old.stopIDs == [2, 5])
        let (own, _) = try bundle(manifest(rankEntry: "\"bigram_rank\": 2"))
        #expect(try own.adapter().bigramBiasFile == nil)
        #expect(own.manifest != new.manifest)
    }

    @Test func aManifestWithoutARankIsRefused() throws {
        let folder = try Folder(["manifest.json": manifest(rankEntry: "\"rank\": 2")])
        let path = folder.url.appendingPathComponent("manifest.json").path
        let reason = "no entry 'adapters.my_app.config.bigramRank'"
        #expect(throws: SpeculativeError.damagedFile(path: path, reason: reason)) {
            try SpeculativeBundle(contentsOf: folder.url)
        }
    }

    @Test(arguments: ["bigram", "markov"], [false, true])
    func aBiasIsReadUnderEitherName(_ name: String, _ half: Bool) throws {
        let file = tensorFile([("\(name).u", Self.u), ("other", Self.v), ("\(name).v", Self.v)], half: half)
        let (whole, folder) = try bundle(manifest(rankEntry: "\"\(name)_rank\": 2"), ["own.safetensors": file])
        let bias = try #require(try whole.bigramBias(of: whole.adapter()))
        #expect(bias.rank == Self.rank)
        #expect(added(bias) == product)
        withExtendedLifetime(folder) {}
    }

    @Test(arguments: ["bigram_bias_file", "parent_bias_file"])
    func aSharedBiasIsReadFromItsFile(_ entry: String) throws {
        let shared = tensorFile([("markov.u", Self.u), ("markov.v", Self.v)])
        let own = tensorFile([("bigram.u", Self.v), ("bigram.v", Self.v)])
        let (whole, folder) = try bundle(
            manifest(rankEntry: "\"bigram_rank\": 2", fileEntry: "\"\(entry)\": \"shared.safetensors\""),
            ["own.safetensors": own, "shared.safetensors": shared])
        #expect(added(try #require(try whole.bigramBias(of: whole.adapter()))) == product)
        withExtendedLifetime(folder) {}
    }

    @Test func aBiasThatIsNotThereIsNamed() throws {
        let file = tensorFile([("pruning.u", Self.u)])
        let (whole, folder) = try bundle(manifest(rankEntry: "\"markov_rank\": 2"), ["own.safetensors": file])
        let path = folder.url.appendingPathComponent("own.safetensors").path
        #expect(throws: SpeculativeError.damagedFile(path: path, reason: "no tensor 'bigram.u'")) {
            try whole.bigramBias(of: whole.adapter())
        }
        withExtendedLifetime(folder) {}
    }

    @Test func aBiasOfAnotherRankIsNamed() throws {
        let file = tensorFile([("markov.u", Self.u), ("markov.v", Self.v)])
        let (whole, folder) = try bundle(manifest(rankEntry: "\"bigram_rank\": 3"), ["own.safetensors": file])
        let path = folder.url.appendingPathComponent("own.safetensors").path
        let reason = "the bigram bias does not have vocabulary × rank numbers"
        #expect(throws: SpeculativeError.damagedFile(path: path, reason: reason)) {
            try whole.bigramBias(of: whole.adapter())
        }
        withExtendedLifetime(folder) {}
    }
}

extension FixedWidthInteger {
    fileprivate var littleEndianBytes: [UInt8] { withUnsafeBytes(of: littleEndian) { Array($0) } }
}
