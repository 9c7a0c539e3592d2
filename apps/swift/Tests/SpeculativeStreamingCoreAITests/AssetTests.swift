#if canImport(CoreAI)
    import CoreAI
    import Foundation
    import SpeculativeStreaming
    import Testing
    import TinyBundles

    @testable import SpeculativeStreamingCoreAI

    /// Runs real assets: Core AI itself on Apple platforms, Apple's runtime for Python on Linux.
    @Suite(.serialized, .enabled(if: TinyBundle.hasAssets, "coreai-core is not installed: the bundles have no assets"))
    struct AssetTests {
        /// Every form of the same model: keys and values as a state and as inputs, in one asset and in several.
        static let forms = ["coreai", "coreai-inputs", "coreai-parts-2", "coreai-inputs-parts-3"]

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        private func expectAnswers(_ tiny: TinyBundle, of app: String) async throws {
            let adapter = try tiny.bundle.adapter(app)
            for answer in try TinyBundle.assetAnswers(of: app) {
                let model = try await CoreAIStepModel.open(adapter, of: tiny.bundle)
                let request = DecodingRequest(prompt: answer.prompt, maxTokens: 16, stopIDs: tiny.bundle.stopIDs)
                var loop = try DecodingLoop(model: model, drafter: tiny.bundle.drafter(for: adapter), request: request)
                var (tokens, trees) = ([Int](), [[[Int]]]())
                while let step = try await loop.next() {
                    tokens += step.tokens
                    if let tree = step.tree { trees.append([tree.tokens, tree.parents]) }
                }
                #expect(tokens == answer.tokens)
                #expect(trees == answer.trees)
                // The last token of the prompt runs as a step.
                #expect(model.calls == ((answer.prompt.count - 1 + 15) / 16, answer.calls + 1))
            }
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test(arguments: forms) func everyTreeIsThatOfThePythonStepModel(_ form: String) async throws {
            try await expectAnswers(TinyBundle(form), of: "tiny")
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func anotherAdapterOfTheSameAssetAnswersAsInPython() async throws {
            try await expectAnswers(TinyBundle("coreai"), of: "other")
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func adaptersOfOneAssetTakeTurns() async throws {
            let tiny = try TinyBundle("coreai")
            let generator = try await SpeculativeGenerator(
                coreAI: tiny.bundle, adapter: "tiny", tokenizer: tiny.tokenizer)
            for app in ["tiny", "other", "tiny"] {
                try await generator.select(adapter: app, of: tiny.bundle, options: CoreAIOptions())
                for answer in try TinyBundle.assetAnswers(of: app) {
                    let found = try await generator.generate(
                        tokens: answer.prompt, options: GenerationOptions(maxTokens: 16))
                    #expect(found.tokens == answer.tokens)
                    #expect(found.text == answer.text)
                    #expect(found.statistics.tokensPerCall == answer.tokensPerCall)
                }
            }
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func theGoldenTracesAreReplayedTheSameInEveryForm() async throws {
            var reports: [ReplayReport] = []
            for form in Self.forms {
                let tiny = try TinyBundle(form)
                let adapter = try tiny.bundle.adapter("tiny")
                let functions = try #require(adapter.coreai)
                let stem = tiny.bundle.url.appendingPathComponent(try #require(adapter.golden(of: functions)))
                var replay = Replay(model: try await CoreAIStepModel.open(adapter, of: tiny.bundle))
                reports.append(try await replay.run(try GoldenTraces.load(stem: stem), maxSteps: 6))
            }
            #expect(reports[0].prompts == 2)
            #expect(reports[0].nodes > 30)
            #expect(reports[0].differences == reports[0].nearTies, "half precision may only move near ties")
            #expect(try #require(reports[0].psnr) > 35)
            for report in reports { #expect(report == reports[0]) }
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func samplesWhatThePythonStepModelSamples() async throws {
            let (tiny, answers) = (try TinyBundle("coreai-sampling"), try TinyBundle.sampled("coreai-sampled"))
            let generator = try await SpeculativeGenerator(coreAI: tiny.bundle, tokenizer: tiny.tokenizer)
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

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func everyKeptNodeHasStreamsToDraftFrom() async throws {
            let (tiny, answers) = (try TinyBundle("coreai-sampling"), try TinyBundle.sampled("coreai-sampled"))
            let model = try await CoreAIStepModel.open(tiny.bundle.adapter(), of: tiny.bundle)
            _ = try await model.prefill(answers.prompt)
            let verified = try await model.step(DraftTree(tokens: answers.tokens, parents: answers.parents))
            #expect(verified.kept == answers.kept)
            for (node, expected) in zip(answers.kept, answers.largest) {
                let streams = try #require(try model.streamLogits(ofNode: node))
                #expect((0..<streams.rows).map { row in streams.withRow(row) { $0.max() } } == expected)
            }
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func loadedFunctionsAreUsedAgain() async throws {
            let tiny = try TinyBundle("coreai")
            let functions = try #require(tiny.bundle.adapter("tiny").coreai)
            let store = AssetStore()
            let first = try await store.functions(functions, of: tiny.bundle, CoreAIOptions())
            await store.releaseIdle()
            let second = try await store.functions(functions, of: tiny.bundle, CoreAIOptions())
            let (step, again) = (first.step.links[0].function, second.step.links[0].function)
            #expect(step === again, "a function in use outlives a memory warning")
            #expect(step !== second.prefill.links[0].function)
        }
    }

    /// The step function's inputs in Core AI's arrays.
    @Suite struct ArrayInputTests {
        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func everyInputIsTheRecordedOne() throws {
            let recorded = try RecordedInputs()
            #expect(recorded.cases.count == 20)
            for (number, expected) in recorded.cases.enumerated() {
                let arrays = try recorded.filled(number, ArrayInput.self).arrays.mapValues(\.array)
                for (name, integers) in expected.integers {
                    #expect(try arrays[name]?.readIntegers() ?? [] == integers, "\(name) of case \(number)")
                }
                let mask = try #require(arrays["mask"]).readLogits(rows: nil, block: 0).values
                #expect(mask.map { $0 == 0 } == expected.shows, "mask of case \(number)")
                #expect(mask.allSatisfy { $0 == 0 || $0 == -10_000 })
            }
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func inputsThatTheHostCommitsAreLeftOut() throws {
            let limits = StepLimits(numNodes: 4, numKept: 3, numStreams: 2, context: 8)
            let inputs = try StepInputs<ArrayInput>(limits, gated: true, commits: false)
            #expect(inputs.arrays.keys.sorted() == ["mask", "parents", "positions", "stream_gate", "tokens"])
        }
    }
#endif
