import CoreML
import Foundation
import SpeculativeStreaming
import Testing
import TinyBundles

@testable import SpeculativeStreamingCoreML

/// Runs the real package: Core ML itself on Apple platforms, the reference executor on Linux.
@Suite(.serialized) struct PackageTests {
    @Test func generatesWhatThePythonStepModelGenerates() async throws {
        let tiny = try TinyBundle()
        let generator = try await SpeculativeGenerator(
            coreML: tiny.bundle, tokenizer: tiny.tokenizer, options: tiny.options)
        for answer in try TinyBundle.answers() {
            let found = try await generator.generate(tokens: answer.prompt, options: GenerationOptions(maxTokens: 16))
            #expect(found.tokens == answer.tokens)
            #expect(found.statistics.calls == answer.calls)
            #expect(found.text == answer.text)
            let plain = try await generator.generate(
                tokens: answer.prompt, options: GenerationOptions(maxTokens: 16, numNodes: 1))
            #expect(plain.tokens == answer.tokens)
        }
    }

    @Test func replaysTheGoldenTraces() async throws {
        let tiny = try TinyBundle()
        let adapter = try tiny.bundle.adapter("tiny")
        let stem = tiny.bundle.url.appendingPathComponent(try #require(adapter.golden))
        var replay = Replay(model: try await CoreMLStepModel.open(adapter, of: tiny.bundle, options: tiny.options))
        let report = try await replay.run(try GoldenTraces.load(stem: stem), maxSteps: 4)
        #expect(report.prompts == 2)
        #expect(report.nodes > 20)
        #expect(report.differences == report.nearTies, "half precision may only move near ties")
        #expect(try #require(report.psnr) > 35)
    }

    @Test func replaysWhatAnotherMachineRecorded() async throws {
        let tiny = try TinyBundle()
        let adapter = try tiny.bundle.adapter("tiny")
        let functions = try #require(adapter.coreml)
        let folder = tiny.bundle.url.deletingLastPathComponent().appendingPathComponent("recorded")
        let traces = try tiny.bundle.recordedTraces(of: adapter, for: functions, in: folder)
        #expect(traces.count == 3)
        #expect(try GoldenTraces.origin(stem: folder.appendingPathComponent("tiny"))?.device == "cpu")
        var replay = Replay(model: try await CoreMLStepModel.open(adapter, of: tiny.bundle, options: tiny.options))
        let report = try await replay.run(traces, maxSteps: 4)
        #expect(report.prompts == 3)
        #expect(report.differences == report.nearTies, "half precision may only move near ties")
        let other = try TinyBundle("parts-2").bundle  // without MLX's weights, with which was recorded
        let stem = folder.appendingPathComponent("tiny").path
        #expect(
            throws: SpeculativeError.invalidSetting(
                "\(stem).json: recorded with other weights than those of 'tiny' in this bundle")
        ) { try other.recordedTraces(of: other.adapter(), for: functions, in: folder) }
        let missing = folder.appendingPathComponent("none")
        #expect(throws: SpeculativeError.missingFile(path: missing.appendingPathComponent("tiny.json").path)) {
            try tiny.bundle.recordedTraces(of: adapter, for: functions, in: missing)
        }
    }

    @Test func samplingNeedsAPackageWithLogits() async throws {
        let tiny = try TinyBundle()
        let generator = try await SpeculativeGenerator(
            coreML: tiny.bundle, tokenizer: tiny.tokenizer, options: tiny.options)
        let sampler = Sampler.sampling(try Sampling())
        await #expect(throws: SpeculativeError.noLogits) {
            try await generator.generate(tokens: [1, 9], options: GenerationOptions(sampler: sampler))
        }
        await #expect(throws: SpeculativeError.promptTooLong(tokens: 97, context: 96)) {
            try await generator.generate(tokens: Array(repeating: 5, count: 97))
        }
    }

    @Test func samplesWhatThePythonStepModelSamples() async throws {
        let (tiny, answers) = (try TinyBundle("sampling"), try TinyBundle.sampled("sampled"))
        let generator = try await SpeculativeGenerator(
            coreML: tiny.bundle, tokenizer: tiny.tokenizer, options: tiny.options)
        for run in answers.runs {
            let sampler = Sampler.sampling(try Sampling(temperature: 0.8, topK: 30, seed: run.seed))
            let options = GenerationOptions(maxTokens: 16, sampler: sampler)
            let found = try await generator.generate(tokens: answers.prompt, options: options)
            #expect(found.tokens == run.tokens)
            #expect(found.statistics.calls == run.calls)
            let plain = try await generator.generate(tokens: answers.prompt, options: options.plain)
            #expect(plain.tokens == run.tokens)
        }
    }

    @Test func everyKeptNodeHasStreamsToDraftFrom() async throws {
        let (tiny, answers) = (try TinyBundle("sampling"), try TinyBundle.sampled("sampled"))
        let model = try await CoreMLStepModel.open(tiny.bundle.adapter(), of: tiny.bundle, options: tiny.options)
        _ = try await model.prefill(answers.prompt)
        let verified = try await model.step(DraftTree(tokens: answers.tokens, parents: answers.parents))
        #expect(verified.kept == answers.kept)
        for (node, expected) in zip(answers.kept, answers.largest) {
            let streams = try #require(try model.streamLogits(ofNode: node))
            #expect((0..<streams.rows).map { row in streams.withRow(row) { $0.max() } } == expected)
        }
        #expect(try model.streamLogits(ofNode: verified.acceptedNode) == verified.streamLogits)
    }

    @Test func compiledPackagesAreFoundAgainByContent() async throws {
        let tiny = try TinyBundle()
        let package = try #require(tiny.bundle.adapter().coreml?.package)
        let first = try await tiny.options.cache.compiled(package, of: tiny.bundle)
        let date = try FileManager.default.attributesOfItem(atPath: first.path)[.modificationDate] as? Date
        let second = try await tiny.options.cache.compiled(package, of: tiny.bundle)
        #expect(first == second)
        #expect(try FileManager.default.attributesOfItem(atPath: second.path)[.modificationDate] as? Date == date)
    }

    @Test func selectingAnAdapterTakesTheModelOver() async throws {
        let tiny = try TinyBundle()
        let generator = try await SpeculativeGenerator(
            coreML: tiny.bundle, tokenizer: tiny.tokenizer, options: tiny.options)
        let answers = try TinyBundle.answers()
        var running = generator.stream(tokens: answers[1].prompt).makeAsyncIterator()
        _ = try await running.next()
        try await generator.select(adapter: "tiny", of: tiny.bundle, options: tiny.options)
        await #expect(throws: SpeculativeError.superseded) { try await running.next() }
        let found = try await generator.generate(
            tokens: answers[0].prompt, options: GenerationOptions(maxTokens: 16))
        #expect(found.tokens == answers[0].tokens)
        await #expect(throws: SpeculativeError.unknownAdapter(name: "other", known: ["tiny"])) {
            try await generator.select(adapter: "other", of: tiny.bundle, options: tiny.options)
        }
    }

    @Test func loadedFunctionsAreUsedAgain() async throws {
        let tiny = try TinyBundle()
        let functions = try #require(tiny.bundle.adapter().coreml)
        let store = FunctionStore()
        let first = try await store.functions(functions, of: tiny.bundle, tiny.options)
        await store.releaseIdle()
        let second = try await store.functions(functions, of: tiny.bundle, tiny.options)
        let (step, again) = (first.step.links[0].function, second.step.links[0].function)
        #expect(step === again, "a function in use outlives a memory warning")
        #expect(step !== second.prefill.links[0].function)
    }
}
