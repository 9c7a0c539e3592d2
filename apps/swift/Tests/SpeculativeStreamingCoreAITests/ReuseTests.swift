#if canImport(CoreAI)
    import CoreAI
    import SpeculativeStreaming
    import Testing
    import TinyBundles

    @testable import SpeculativeStreamingCoreAI

    /// A text that goes on where another one was: only what is new is computed, and nothing else changes.
    @Suite(.serialized, .enabled(if: TinyBundle.hasAssets, "coreai-core is not installed: the bundles have no assets"))
    struct ReuseTests {
        /// Long enough for two chunks of 16.
        private let prompt = Array(40..<65)

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        private func generated(_ model: CoreAIStepModel, _ tiny: TinyBundle, _ prompt: [Int]) async throws -> [Int] {
            let adapter = try tiny.bundle.adapter("tiny")
            let request = DecodingRequest(prompt: prompt, maxTokens: 8, reusesText: true)
            var loop = try DecodingLoop(model: model, drafter: tiny.bundle.drafter(for: adapter), request: request)
            var tokens: [Int] = []
            while let step = try await loop.next() { tokens += step.tokens }
            return tokens
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test(arguments: ["coreai", "coreai-inputs", "coreai-parts-2"])
        func onlyTheAddedTokensArePrefilled(_ form: String) async throws {
            let tiny = try TinyBundle(form)
            let model = try await CoreAIStepModel.open(tiny.bundle.adapter("tiny"), of: tiny.bundle)
            let first = try await generated(model, tiny, prompt)
            #expect(model.calls.prefill == 2)
            let longer = prompt + first + [70, 71, 72]
            #expect(model.reusable(longer) > prompt.count)
            let second = try await generated(model, tiny, longer)
            #expect(model.calls.prefill == 3, "one chunk for what was added")
            let fresh = try await CoreAIStepModel.open(tiny.bundle.adapter("tiny"), of: tiny.bundle)
            #expect(try await generated(fresh, tiny, longer) == second)
            #expect(fresh.calls.prefill == 3, "35 tokens but the last")
            // Another continuation of the same beginning, and the same text once more.
            let other = prompt.dropLast(4) + [90, 91]
            #expect(model.reusable(Array(other)) == prompt.count - 4)
            let third = try await generated(model, tiny, Array(other))
            let again = try await CoreAIStepModel.open(tiny.bundle.adapter("tiny"), of: tiny.bundle)
            #expect(try await generated(again, tiny, Array(other)) == third)
            let calls = model.calls.prefill
            #expect(try await generated(model, tiny, Array(other)) == third)
            #expect(model.calls.prefill == calls, "only the last token of the same prompt runs, as a step")
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func whatIsStillToBeMovedIsKeptOnlyForAStep() async throws {
            let tiny = try TinyBundle("coreai")
            let model = try await CoreAIStepModel.open(tiny.bundle.adapter("tiny"), of: tiny.bundle)
            _ = try await model.prefill(prompt)
            _ = try await model.step(DraftTree(tokens: [70], parents: [-1]))
            try model.commit([0])
            let text = prompt + [70]
            #expect(model.reusable(text + [71]) == text.count, "the step for 71 moves the row of 70")
            #expect(model.reusable(text + [71, 72]) == prompt.count, "a chunk with 71 would not see 70")
            let hosted = try TinyBundle("coreai-inputs")
            let other = try await CoreAIStepModel.open(hosted.bundle.adapter(), of: hosted.bundle)
            _ = try await other.prefill(prompt)
            _ = try await other.step(DraftTree(tokens: [70], parents: [-1]))
            try other.commit([0])
            #expect(other.reusable(text + [71, 72]) == text.count, "the host has written it")
        }
    }
#endif
