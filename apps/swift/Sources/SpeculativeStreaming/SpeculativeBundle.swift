import Foundation

/// An opened bundle folder: what ss-convert writes and everything on the device reads.
public struct SpeculativeBundle: Sendable {
    public let url: URL
    public let manifest: Manifest

    /// Reads the manifest; every file must be there with its size.
    ///
    /// - Parameter verifyingChecksums: also compares every file's SHA-256, which reads the whole bundle: worth
    ///   it after a download, not at every start.
    /// - Throws: `notABundle`, `unsupportedFormat`, `damagedFile`, `missingFile`, `wrongSize` or
    ///   `checksumMismatch`.
    public init(contentsOf url: URL, verifyingChecksums: Bool = false) throws {
        let file = url.appendingPathComponent("manifest.json")
        guard FileManager.default.fileExists(atPath: file.path) else {
            throw SpeculativeError.notABundle(path: url.path)
        }
        self.url = url
        manifest = try Manifest(contentsOf: file)
        for (name, record) in manifest.files.sorted(by: { $0.key < $1.key }) {
            try check(name, record, verifyingChecksums)
        }
    }

    /// The named adapter, or the only one. Throws `adapterNotNamed` or `unknownAdapter`.
    public func adapter(_ name: String? = nil) throws -> BundledAdapter {
        let known = manifest.adapters.keys.sorted()
        guard let name = name ?? (known.count == 1 ? known[0] : nil) else {
            throw SpeculativeError.adapterNotNamed(known: known)
        }
        guard let adapter = manifest.adapters[name] else {
            throw SpeculativeError.unknownAdapter(name: name, known: known)
        }
        return adapter
    }

    /// End tokens of the base model.
    public var stopIDs: Set<Int> { Set(manifest.architecture.eosIds) }

    /// The adapter's bigram term, nil without one. Throws for a missing or damaged tensor file.
    public func parentBias(of adapter: BundledAdapter) throws -> ParentBias? {
        guard adapter.config.markovRank > 0 else { return nil }
        let file = url.appendingPathComponent(adapter.parentBiasFile ?? adapter.tensorFile)
        let tensors = try TensorFile(contentsOf: file)
        let (u, v) = (try tensors.floats("markov.u"), try tensors.floats("markov.v"))
        let expected = manifest.architecture.vocabSize * adapter.config.markovRank
        guard u.count == expected, v.count == expected else {
            throw SpeculativeError.damagedFile(
                path: file.path, reason: "the parent bias does not have vocabulary × rank numbers")
        }
        return ParentBias(u: u, v: v, rank: adapter.config.markovRank)
    }

    /// The drafter of an adapter: best-first trees of the size it was converted for, or smaller.
    public func drafter(
        for adapter: BundledAdapter, numNodes: Int? = nil, shape: Drafter.Shape = .bestFirst, topK: Int = 3
    ) throws -> Drafter {
        try Drafter(
            numNodes: numNodes ?? adapter.numNodes, shape: shape, topK: topK,
            parentBias: try parentBias(of: adapter))
    }

    private func check(_ name: String, _ record: FileRecord, _ checksum: Bool) throws {
        let file = url.appendingPathComponent(name)
        guard let size = try? FileManager.default.attributesOfItem(atPath: file.path)[.size] as? Int else {
            throw SpeculativeError.missingFile(path: file.path)
        }
        guard size == record.bytes else {
            throw SpeculativeError.wrongSize(file: name, found: size, expected: record.bytes)
        }
        if checksum, try sha256(of: file) != record.sha256 {
            throw SpeculativeError.checksumMismatch(file: name)
        }
    }
}
