import Foundation
import SpeculativeChatModel
import Testing

@testable import SpeculativeStreaming

@MainActor @Suite struct ChatModelTests {
    private static func model() -> ChatModel {
        ChatModel { bundle, name in
            let limits = StepLimits(numNodes: 8, numKept: 8, numStreams: 3, context: 64)
            return SpeculativeGenerator(
                model: HashModel(key: 99, vocabulary: 26, limits: limits), bundle: bundle,
                adapter: try bundle.adapter(name), drafter: try Drafter(numNodes: 8), tokenizer: Letters())
        }
    }

    @Test func answersBothWaysWithDraftedTextMarked() async throws {
        let folder = try Folder(["manifest.json": chatManifest])
        let model = Self.model()
        model.choose(folder.url)
        #expect(model.adapters == ["app"])
        #expect(model.templateFields == ["a"])
        model.comparesWithPlain = true
        await model.ask(["a": "hello"])
        #expect(model.problem == nil)
        #expect(model.speculative.text.count == 12)
        #expect(model.speculative.text == model.plain.text)
        #expect(model.speculative.segments.map(\.isDrafted).contains(true))
        #expect(!model.plain.segments.map(\.isDrafted).contains(true))
        #expect(model.speculative.statistics.calls < model.plain.statistics.calls)
        #expect(!model.isRunning)
    }

    @Test func problemsAreReadable() async throws {
        let model = Self.model()
        model.choose(URL(fileURLWithPath: "/nowhere"))
        #expect(model.problem == "/nowhere: not a bundle (no manifest.json); make one with ss-convert")
        let folder = try Folder(["manifest.json": chatManifest])
        model.choose(folder.url)
        await model.ask([:])
        #expect(model.problem == "the prompt template needs the field 'a' (its fields: a)")
    }
}

private let chatManifest = """
    {"format_version": 1, "architecture": {"family": "llama", "vocab_size": 26, "bos_id": null, "eos_ids": []},
     "adapters": {"app": {"app": "app", "config": {"mode": "lossless", "num_streams": 3,
       "main_attends_streams": false, "bigram_rank": 0}, "prompt_template": "{a}", "stop_strings": [],
       "max_tokens": 12, "num_nodes": 8, "tensor_file": "x", "coreml": null, "golden": null}},
     "files": {}}
    """
