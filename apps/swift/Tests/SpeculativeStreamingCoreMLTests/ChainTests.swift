import CoreML
import Foundation
import SpeculativeStreaming
import Testing
import TinyBundles

@testable import SpeculativeStreamingCoreML

/// The tiny model divided into two and three packages: what one package says, and readable errors.
@Suite(.serialized) struct ChainTests {
    private func model(_ tiny: TinyBundle, backings: Bool = true) async throws -> CoreMLStepModel {
        var options = tiny.options
        options.usesOutputBackings = backings
        return try await CoreMLStepModel.open(tiny.bundle.adapter(), of: tiny.bundle, options: options)
    }

    /// The answers of the Python step model, tree by tree.
    private func expectAnswers(_ tiny: TinyBundle, backings: Bool = true) async throws {
        let adapter = try tiny.bundle.adapter()
        for answer in try TinyBundle.answers() {
            let request = DecodingRequest(prompt: answer.prompt, maxTokens: 16, stopIDs: tiny.bundle.stopIDs)
            var loop = try DecodingLoop(
                model: await model(tiny, backings: backings), drafter: tiny.bundle.drafter(for: adapter),
                request: request)
            var (tokens, trees) = ([Int](), [[[Int]]]())
            while let step = try await loop.next() {
                tokens += step.tokens
                if let tree = step.tree { trees.append([tree.tokens, tree.parents]) }
            }
            #expect(tokens == answer.tokens)
            #expect(trees == answer.trees)
            #expect(trees.count == answer.calls)
        }
    }

    @Test(arguments: ["bundle", "parts-2", "parts-3"])
    func everyTreeIsThatOfThePythonStepModel(_ name: String) async throws {
        try await expectAnswers(TinyBundle(name))
    }

    @Test func memoryOfTheChainsOwnChangesNothing() async throws {
        try await expectAnswers(TinyBundle("parts-3"), backings: false)
    }

    @Test func theGoldenTracesFindWhatTheyFindInOnePackage() async throws {
        var reports: [ReplayReport] = []
        for name in ["bundle", "parts-2", "parts-3"] {
            let tiny = try TinyBundle(name)
            let stem = tiny.bundle.url.appendingPathComponent(try #require(tiny.bundle.adapter().golden))
            var replay = Replay(model: try await model(tiny))
            reports.append(try await replay.run(try GoldenTraces.load(stem: stem), maxSteps: 6))
        }
        #expect(reports[0].nodes > 30)
        #expect(reports[1] == reports[0])
        #expect(reports[2] == reports[0])
    }

    @Test func everyPartHasAFunctionAndAStateOfItsOwn() async throws {
        let tiny = try TinyBundle("parts-3")
        let functions = try #require(tiny.bundle.adapter().coreml)
        let loaded = try await FunctionStore().functions(functions, of: tiny.bundle, tiny.options)
        #expect(loaded.step.links.count == 3)
        #expect(Set(loaded.step.links.map { ObjectIdentifier($0.function) }).count == 3)
        #expect(loaded.step.makeStates().count == 3)
        #expect(loaded.step.links[2].feeds?["previous_kept"] == "kept")
    }

    @Test func anInputThatNothingFeedsIsNamed() async throws {
        let tiny = try TinyBundle("parts-2")
        let functions = try #require(tiny.bundle.adapter().coreml)
        let step = try await FunctionStore().functions(functions, of: tiny.bundle, tiny.options).step
        let inputs = try StepInputs<MultiArrayInput>(
            StepLimits(numNodes: 12, numKept: 9, numStreams: 3, context: 96), gated: false)
        func chain(_ feeds: [String: String]?) -> FunctionChain {
            FunctionChain(links: [step.links[0], FunctionChain.Link(function: step.links[1].function, feeds: feeds)])
        }
        func start(_ feeds: [String: String]?) throws {
            _ = try ChainedCall(chain(feeds), inputs: inputs.features, usesOutputBackings: true)
        }
        let whole = try #require(step.links[1].feeds)
        try start(whole)
        let says = "part 2 of the model has an input 'previous_hidden' that the manifest's chain does not feed"
        #expect(throws: SpeculativeError.backEnd(says)) { try start(whole.filter { $0.key != "previous_hidden" }) }
        #expect(throws: SpeculativeError.backEnd(says)) {
            try start(whole.merging(["previous_hidden": "hiden"]) { $1 })
        }
    }
}

/// Divided bundles with something missing or changed.
@Suite struct DividedBundleTests {
    private static let last = "coreml/tiny-base-2-of-2.mlpackage"
    private static let weights = last + "/Data/com.apple.CoreML/weights/weight.bin"

    /// What opening a copy of the bundle says after `change`.
    private func refusal(_ change: (_ copy: URL) throws -> Void) throws -> SpeculativeError? {
        let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        try FileManager.default.copyItem(at: TinyBundle("parts-2").bundle.url, to: folder)
        defer { try? FileManager.default.removeItem(at: folder) }
        try change(folder)
        do {
            _ = try SpeculativeBundle(contentsOf: folder, verifyingChecksums: true)
            return nil
        } catch { return error as? SpeculativeError }
    }

    private func edit(_ copy: URL, _ change: (inout [String: Any]) -> Void) throws {
        let file = copy.appendingPathComponent("manifest.json")
        let found = try JSONSerialization.jsonObject(with: Data(contentsOf: file))
        var manifest = try #require(found as? [String: Any])
        change(&manifest)
        try JSONSerialization.data(withJSONObject: manifest).write(to: file)
    }

    /// Changes the adapter's `coreml` entry.
    private func editFunctions(_ copy: URL, _ change: (inout [String: Any]) -> Void) throws {
        try edit(copy) { manifest in
            guard var adapters = manifest["adapters"] as? [String: Any], var tiny = adapters["tiny"] as? [String: Any],
                var functions = tiny["coreml"] as? [String: Any]
            else { return }
            change(&functions)
            tiny["coreml"] = functions
            adapters["tiny"] = tiny
            manifest["adapters"] = adapters
        }
    }

    @Test func anAdapterThatIsAnInputIsRefused() async throws {
        let tiny = try TinyBundle("bundle")
        let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        try FileManager.default.copyItem(at: tiny.bundle.url, to: folder)
        defer { try? FileManager.default.removeItem(at: folder) }
        try editFunctions(folder) { $0["lora"] = "inputs" }
        let bundle = try SpeculativeBundle(contentsOf: folder, verifyingChecksums: true)
        let adapter = try bundle.adapter()
        let says =
            "adapter 'tiny' is an input of its functions (ss-convert --lora inputs); "
            + "this library runs packages with --lora baked"
        await #expect(throws: SpeculativeError.backEnd(says)) {
            _ = try await CoreMLStepModel.open(adapter, of: bundle, options: tiny.options)
        }
    }

    @Test func anUnchangedCopyOpens() throws {
        #expect(try refusal { try edit($0) { _ in } } == nil)
    }

    @Test func aMissingPartIsNamed() throws {
        let missing = try refusal { try FileManager.default.removeItem(at: $0.appendingPathComponent(Self.last)) }
        #expect(missing?.description.contains("/" + Self.last + "/") == true)
        #expect(missing?.description.hasSuffix(": no such file") == true)
    }

    @Test func aChangedPartIsNamed() throws {
        let changed = try refusal { copy in
            let file = copy.appendingPathComponent(Self.weights)
            var bytes = try Data(contentsOf: file)
            bytes[bytes.count / 2] ^= 1
            try bytes.write(to: file)
        }
        #expect(changed == .checksumMismatch(file: Self.weights))
    }

    @Test func aPartThatTheManifestDoesNotListIsNamed() throws {
        let unlisted = try refusal { copy in
            try edit(copy) { manifest in
                let files = manifest["files"] as? [String: Any]
                manifest["files"] = files?.filter { !$0.key.hasPrefix(Self.last) }
            }
        }
        let says = "its package '\(Self.last)' is not among the bundle's files"
        #expect(unlisted?.description.hasSuffix("manifest.json: damaged (adapter 'tiny': \(says))") == true)
    }

    @Test func aChainThatDoesNotFitItsPartsIsRefused() throws {
        let short = try refusal { copy in
            try editFunctions(copy) { $0["chain"] = ($0["chain"] as? [Any]).map { Array($0.dropLast()) } }
        }
        #expect(short?.description.contains("its model has 2 parts, the chain describes 1") == true)
        let swapped = try refusal { copy in
            try editFunctions(copy) { $0["chain"] = ($0["chain"] as? [Any]).map { Array($0.reversed()) } }
        }
        #expect(swapped?.description.contains("the parts of its model do not follow one another") == true)
    }
}
