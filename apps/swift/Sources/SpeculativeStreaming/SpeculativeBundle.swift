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
        for (name, adapter) in manifest.adapters.sorted(by: { $0.key < $1.key }) {
            for functions in [adapter.coreml, adapter.coreai].compactMap(\.self) {
                guard let reason = problem(functions) else { continue }
                throw SpeculativeError.damagedFile(path: file.path, reason: "adapter '\(name)': \(reason)")
            }
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
    public func bigramBias(of adapter: BundledAdapter) throws -> BigramBias? {
        guard adapter.config.bigramRank > 0 else { return nil }
        let file = url.appendingPathComponent(adapter.bigramBiasFile ?? adapter.tensorFile)
        let tensors = try TensorFile(contentsOf: file)
        // Bundles of earlier versions call the factors `markov`.
        let prefix = tensors.names.contains("markov.u") ? "markov" : "bigram"
        let (u, v) = (try tensors.floats("\(prefix).u"), try tensors.floats("\(prefix).v"))
        let expected = manifest.architecture.vocabSize * adapter.config.bigramRank
        guard u.count == expected, v.count == expected else {
            throw SpeculativeError.damagedFile(
                path: file.path, reason: "the bigram bias does not have vocabulary × rank numbers")
        }
        return BigramBias(u: u, v: v, rank: adapter.config.bigramRank)
    }

    /// SHA-256 of what stands for the weights of base and adapter: their files' SHA-256, one per line.
    public func weightsDigest(_ adapter: BundledAdapter) -> String {
        let names = ["mlx/base.safetensors", adapter.tensorFile, adapter.bigramBiasFile].compactMap { $0 }
        let lines = names.map { manifest.files[$0]?.sha256 ?? "" }
        return sha256(of: Data(lines.joined(separator: "\n").utf8))
    }

    /// Digest over the paths and digests that the manifest records of a package's files.
    package func contentDigest(of package: String) -> String {
        let files = manifest.files.filter { $0.key.hasPrefix(package + "/") }
        let lines = files.sorted { $0.key < $1.key }.map { "\($0.key.dropFirst(package.count)) \($0.value.sha256)" }
        return sha256(of: Data(lines.joined(separator: "\n").utf8))
    }

    /// An adapter's traces from a folder that `ss-validate --record` wrote, on a copy of this bundle.
    ///
    /// - Throws: `missingFile`, `damagedFile`; `invalidSetting` for traces of other weights, and for functions with
    ///   compressed weights, which are not those of a recording.
    public func recordedTraces(
        of adapter: BundledAdapter, for functions: StepFunctions, in folder: URL
    ) throws -> [Trace] {
        let stem = folder.appendingPathComponent(adapter.app)
        guard functions.golden == nil else {
            throw SpeculativeError.invalidSetting(
                "'\(functions.package)' has compressed weights, which are not those of a recording (its own golden "
                    + "traces are made with them)")
        }
        guard let origin = try GoldenTraces.origin(stem: stem), origin.weights == weightsDigest(adapter) else {
            throw SpeculativeError.invalidSetting(
                "\(stem.path).json: recorded with other weights than those of '\(adapter.app)' in this bundle")
        }
        return try GoldenTraces.load(stem: stem)
    }

    /// The drafter of an adapter: best-first trees of the size it was converted for, or smaller.
    public func drafter(
        for adapter: BundledAdapter, numNodes: Int? = nil, shape: Drafter.Shape = .bestFirst, treeTopK: Int = 3
    ) throws -> Drafter {
        try Drafter(
            numNodes: numNodes ?? adapter.numNodes, shape: shape, treeTopK: treeTopK,
            bigramBias: try bigramBias(of: adapter))
    }

    /// What is wrong with the description of a model's packages, nil for nothing.
    private func problem(_ functions: StepFunctions) -> String? {
        let packages = functions.packages
        for package in packages where !manifest.files.keys.contains(where: { $0.hasPrefix(package + "/") }) {
            return "its package '\(package)' is not among the bundle's files"
        }
        guard packages.count > 1 else { return nil }
        let chain = functions.chain ?? []
        guard chain.count == packages.count else {
            return "its model has \(packages.count) parts, the chain describes \(chain.count)"
        }
        var next = 0
        for link in chain {
            guard link.layers.count == 2, link.layers[0] == next, link.layers[1] > next else {
                return "the parts of its model do not follow one another"
            }
            next = link.layers[1]
        }
        return nil
    }

    private func check(_ name: String, _ record: BundledFile, _ checksum: Bool) throws {
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
