import Foundation
import Testing

@testable import SpeculativeStreaming

/// Letters a … z as ids 0 … 25.
struct Letters: TextTokenizer {
    func encode(_ text: String) throws -> [Int] { text.utf8.map { Int($0) - 97 } }
    func decode(_ tokens: [Int]) -> String { String(decoding: tokens.map { UInt8($0 + 97) }, as: UTF8.self) }
}

/// Writes a beginning of text and a letter for the role before each message.
private struct Templated: TextTokenizer {
    func encode(_ text: String) throws -> [Int] { try Letters().encode(text) }
    func decode(_ tokens: [Int]) -> String { Letters().decode(tokens) }
    func encode(chat messages: [ChatMessage]) throws -> [Int] {
        try [3] + messages.flatMap { try [$0.role == .user ? 20 : 18] + encode($0.content) }
    }
}

private let manifest = """
    {"format_version": 1, "architecture": {"family": "llama", "vocab_size": 26, "bos_id": null, "eos_ids": []},
     "adapters": {"app": {"app": "app", "config": {"mode": "lossless", "num_streams": 3,
       "main_attends_streams": false, "bigram_rank": 0}, "prompt_template": "{a}{{{b}}}", "stop_strings": STOPS,
       "max_tokens": 40, "num_nodes": 8, "tensor_file": "x", "coreml": null, "golden": null}},
     "files": {}}
    """

/// A folder with a manifest; removed with the value.
final class Folder {
    let url = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)

    init(_ files: [String: String]) throws {
        for (name, text) in files {
            let file = url.appendingPathComponent(name)
            try FileManager.default.createDirectory(
                at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
            try Data(text.utf8).write(to: file)
        }
    }

    deinit { try? FileManager.default.removeItem(at: url) }
}

private func makeGenerator(
    stops: String = "[]", beforeCall: @escaping @Sendable () throws -> Void = {}
) throws -> SpeculativeGenerator {
    let folder = try Folder(["manifest.json": manifest.replacingOccurrences(of: "STOPS", with: stops)])
    let bundle = try SpeculativeBundle(contentsOf: folder.url)
    let model = HashModel(
        key: 99, vocabulary: 26, limits: StepLimits(numNodes: 8, numKept: 8, numStreams: 3, context: 64))
    model.beforeCall = beforeCall
    return SpeculativeGenerator(
        model: model, bundle: bundle, adapter: try bundle.adapter(), drafter: try Drafter(numNodes: 8),
        tokenizer: Letters())
}

/// Lets others run in the middle of every call, and notices when they call as well.
private final class WaitingModel: StepModel {
    private let inner: HashModel
    private var isCalled = false
    private let overlaps: @Sendable () -> Void

    init(_ inner: HashModel, overlaps: @escaping @Sendable () -> Void) { (self.inner, self.overlaps) = (inner, overlaps) }

    var limits: StepLimits { inner.limits }
    var wantsLogits: Bool {
        get { inner.wantsLogits }
        set { inner.wantsLogits = newValue }
    }

    func prefill(
        _ tokens: [Int], keeping kept: Int, isolation: isolated (any Actor)?
    ) async throws -> Proposal {
        await wait(isolation)
        return try await inner.prefill(tokens, keeping: kept, isolation: isolation)
    }

    func step(_ tree: DraftTree, isolation: isolated (any Actor)?) async throws -> Verified {
        await wait(isolation)
        return try await inner.step(tree, isolation: isolation)
    }

    func commit(_ path: [Int]) throws { try inner.commit(path) }

    private func wait(_ isolation: isolated (any Actor)?) async {
        if isCalled { overlaps() }
        isCalled = true
        for _ in 0..<3 { await Task.yield() }
        isCalled = false
    }
}

@Suite struct GeneratorTests {
    @Test func callsThatWaitDoNotOverlap() async throws {
        let folder = try Folder(["manifest.json": manifest.replacingOccurrences(of: "STOPS", with: "[]")])
        let bundle = try SpeculativeBundle(contentsOf: folder.url)
        let limits = StepLimits(numNodes: 8, numKept: 8, numStreams: 3, context: 64)
        let inner = HashModel(key: 99, vocabulary: 26, limits: limits)
        let generator = SpeculativeGenerator(
            model: WaitingModel(inner) { Issue.record("a call began inside another one") }, bundle: bundle,
            adapter: try bundle.adapter(), drafter: try Drafter(numNodes: 8), tokenizer: Letters())
        let expected = try await makeGenerator().generate("hello").tokens
        let finished = await withTaskGroup(of: [Int]?.self) { group in
            for _ in 0..<4 { group.addTask { try? await generator.generate("hello").tokens } }
            group.addTask {
                try? await generator.prewarm(tokens: [1, 2, 3])
                return nil
            }
            return await group.reduce(into: [[Int]]()) { all, tokens in tokens.map { all.append($0) } }
        }
        #expect(!finished.isEmpty, "the last to begin is not superseded")
        for tokens in finished { #expect(tokens == expected) }
    }

    @Test func streamsTheSameTextAsPlainDecoding() async throws {
        let generator = try makeGenerator()
        var (text, drafted) = ("", 0)
        for try await step in generator.stream("hello") {
            text += step.text
            drafted += step.numDrafted
            #expect(step.text.hasPrefix(step.draftedText))
        }
        let plain = try await generator.generate("hello", options: GenerationOptions(numNodes: 1))
        #expect(text == plain.text)
        #expect(text.count == 40)
        #expect(drafted > 0)
        #expect(plain.statistics.calls == 39)
        #expect(plain.statistics.tokensPerCall == 1)
        #expect(plain.finishReason == .length)
    }

    @Test func aStopStringEndsTheTextWithinAStep() async throws {
        let whole = try await makeGenerator().generate("hello")
        let stop = String(whole.text.dropFirst(11).prefix(3))
        let cut = try await makeGenerator(stops: "[\"\(stop)\"]").generate("hello")
        let place = try #require(whole.text.range(of: stop))
        #expect(cut.text == whole.text[..<place.lowerBound])
        #expect(cut.finishReason == .stop)
    }

    @Test func aCancelledTaskThrowsCancelled() async throws {
        let generator = try makeGenerator()
        let task = Task {
            withUnsafeCurrentTask { $0?.cancel() }
            return try await generator.generate("hello")
        }
        await #expect(throws: SpeculativeError.cancelled) { try await task.value }
        let (started, signal) = AsyncStream.makeStream(of: Void.self)
        let slow = try makeGenerator {
            signal.yield()
            while !Task.isCancelled { Thread.sleep(forTimeInterval: 0.001) }
        }
        let second = Task { try await slow.generate("hello") }
        for await _ in started { break }
        second.cancel()
        await #expect(throws: SpeculativeError.cancelled) { try await second.value }
        #expect(try await generator.generate("hello").tokens.count == 40, "the generator can be used on")
    }

    @Test func aNewGenerationSupersedesTheOneInProgress() async throws {
        let generator = try makeGenerator()
        var first = generator.stream("hello").makeAsyncIterator()
        _ = try await first.next()
        var second = generator.stream("world").makeAsyncIterator()
        _ = try await second.next()
        await #expect(throws: SpeculativeError.superseded) { try await first.next() }
        #expect(try await second.next() != nil)
    }

    @Test func conversationsGoThroughTheChatTemplate() async throws {
        let folder = try Folder([
            "manifest.json": manifest.replacingOccurrences(of: "STOPS", with: "[]")
                .replacingOccurrences(of: "\"bos_id\": null", with: "\"bos_id\": 3")
        ])
        let bundle = try SpeculativeBundle(contentsOf: folder.url)
        func generator(_ tokenizer: any TextTokenizer) throws -> SpeculativeGenerator {
            let model = HashModel(
                key: 99, vocabulary: 26, limits: StepLimits(numNodes: 8, numKept: 8, numStreams: 3, context: 64))
            return SpeculativeGenerator(
                model: model, bundle: bundle, adapter: try bundle.adapter(), drafter: try Drafter(numNodes: 8),
                tokenizer: tokenizer)
        }
        let messages = [ChatMessage(.system, "ab"), ChatMessage(.user, "cd")]
        #expect(try generator(Letters()).tokens(of: messages) == [3, 0, 1, 10 - 97, 2, 3])
        let templated = try generator(Templated())
        #expect(try templated.tokens(of: messages) == [3, 18, 0, 1, 20, 2, 3])
        var text = ""
        for try await step in templated.stream(messages) { text += step.text }
        #expect(try await templated.generate(tokens: [3, 18, 0, 1, 20, 2, 3]).text == text)
    }

    @Test func samplingNeedsLogits() async throws {
        let sampler = Sampler.sampling(try Sampling(seed: 3))
        let result = try await makeGenerator().generate("hello", options: GenerationOptions(sampler: sampler))
        #expect(result.tokens.count == 40)
    }

    @Test func moreNodesThanTheDrafterHasAreRefused() async throws {
        let generator = try makeGenerator()
        await #expect(throws: SpeculativeError.tooManyNodes(requested: 9, limit: 8)) {
            try await generator.generate("hello", options: GenerationOptions(numNodes: 9))
        }
    }
}

@Suite struct TextTests {
    @Test func charactersAreNeverCut() {
        struct Bytes: TextTokenizer {
            func encode(_ text: String) throws -> [Int] { text.utf8.map(Int.init) }
            func decode(_ tokens: [Int]) -> String { String(decoding: tokens.map { UInt8($0) }, as: UTF8.self) }
        }
        var detokenizer = Detokenizer(Bytes())
        let pieces = Array("aé→🙂".utf8).map { String(detokenizer.add(Int($0))) }
        #expect(pieces == ["a", "", "é", "", "", "→", "", "", "", "🙂"])
        _ = detokenizer.add(0xf0)
        #expect(String(detokenizer.finish()) == "\u{FFFD}")
    }

    @Test func whatMayBecomeAStopStringIsHeldBack() {
        var stops = StopStrings(["END", "NOW"])
        let add = { (text: String) in stops.add(text.unicodeScalars) }
        #expect(add("ab E") == ("ab ", false))
        #expect(add("N") == ("", false))
        #expect(add("x NO") == ("ENx ", false))
        #expect(add("Wrest") == ("", true))
        #expect(stops.finish() == "")
    }

    @Test func templatesAreFilled() throws {
        #expect(try fillTemplate("{a}-{{x}}-{b}", ["a": "1", "b": "{2}"]) == "1-{x}-{2}")
        #expect(throws: SpeculativeError.missingTemplateField(name: "b", expected: ["a", "b"])) {
            try fillTemplate("{a}{b}", ["a": "1"])
        }
        #expect(throws: SpeculativeError.self) { try fillTemplate("{a", ["a": "1"]) }
    }

    @Test func byteLevelVocabulariesDecode() throws {
        let file = """
            {"added_tokens": [{"id": 0, "special": true}], "decoder": {"type": "ByteLevel"},
             "model": {"vocab": {"<s>": 0, "Ġa": 1, "Ã": 2, "©": 3, "Ċ": 4}}}
            """
        let folder = try Folder(["tokenizer.json": file])
        let decoder = try ByteLevelDecoder(tokenizerFile: folder.url.appendingPathComponent("tokenizer.json"))
        #expect(decoder.decode([0, 1, 2, 3, 4]) == " aé\n")
        #expect(throws: SpeculativeError.self) { try decoder.encode("a") }
    }
}

@Suite struct BundleTests {
    private func refused(_ files: [String: String], check: Bool = false) -> SpeculativeError? {
        do {
            let folder = try Folder(files)
            _ = try SpeculativeBundle(contentsOf: folder.url, verifyingChecksums: check)
            return nil
        } catch { return error as? SpeculativeError }
    }

    private func manifest(_ files: String) -> String {
        SpeculativeStreamingTests.manifest.replacingOccurrences(of: "STOPS", with: "[]")
            .replacingOccurrences(of: "\"files\": {}", with: "\"files\": {\(files)}")
    }

    private let abc = "\"a\": {\"bytes\": 3, \"sha256\": \"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\"}"

    @Test func aWholeBundleOpens() throws {
        #expect(refused(["manifest.json": manifest(abc), "a": "abc"], check: true) == nil)
    }

    @Test func damageIsNamed() {
        #expect(refused(["other": ""])?.description.contains("not a bundle (no manifest.json)") == true)
        #expect(refused(["manifest.json": manifest(abc)])?.description.hasSuffix("/a: no such file") == true)
        #expect(
            refused(["manifest.json": manifest(abc), "a": "abcd"]) == .wrongSize(file: "a", found: 4, expected: 3))
        #expect(
            refused(["manifest.json": manifest(abc), "a": "abd"], check: true) == .checksumMismatch(file: "a"))
        #expect(refused(["manifest.json": manifest(abc), "a": "abd"]) == nil, "digests are only read when asked for")
        #expect(refused(["manifest.json": "{"])?.description.contains("not valid JSON") == true)
        #expect(
            refused(["manifest.json": "{\"format_version\": 1}"])?.description.contains("no entry 'architecture'") == true)
    }

    @Test func aNewerFormatAsksForAnUpdate() {
        let newer = refused(["manifest.json": "{\"format_version\": 2}"])
        #expect(newer?.description.contains("bundle format version 2, this library reads 1; update") == true)
    }

    @Test func unknownAdaptersAreNamedWithTheKnownOnes() throws {
        let folder = try Folder(["manifest.json": manifest("")])
        let bundle = try SpeculativeBundle(contentsOf: folder.url)
        #expect(throws: SpeculativeError.unknownAdapter(name: "sql", known: ["app"])) { try bundle.adapter("sql") }
        #expect(SpeculativeError.unknownAdapter(name: "sql", known: ["app"]).errorDescription
            == "no adapter 'sql' in this bundle (found: app)")
        #expect(try bundle.adapter().prompt(["a": "x", "b": "y"]) == "x{y}")
        #expect(try bundle.adapter().promptFields == ["a", "b"])
    }

    /// FIPS 180-4's own examples, and a length on a block's edge.
    @Test func digests() {
        #expect(sha256(of: Data("abc".utf8)).hasPrefix("ba7816bf8f01cfea"))
        #expect(sha256(of: Data()).hasPrefix("e3b0c44298fc1c14"))
        let long = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"
        #expect(sha256(of: Data(long.utf8)) == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1")
    }

    @Test func halfPrecision() {
        for bits in UInt16.min...UInt16.max where bits & 0x7c00 != 0x7c00 { #expect(Half.bits(Half.float(bits)) == bits) }
        #expect(Half.float(0x7c00) == .infinity)
        #expect(Half.float(0x3c00) == 1)
        #expect(Half.float(1) == 0x1p-24)
        #expect(Half.bits(-1e4) == 0xf0e2)
        #expect(Half.bits(1e6) == 0x7c00)
    }

    @Test func damagedTensorFilesAreRefused() throws {
        let folder = try Folder(["short": "abc", "wrong": "\u{1}\0\0\0\0\0\0\0x"])
        for name in ["short", "wrong"] {
            #expect(throws: SpeculativeError.self) {
                try TensorFile(contentsOf: folder.url.appendingPathComponent(name))
            }
        }
    }
}
