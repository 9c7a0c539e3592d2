import Testing

@testable import SpeculativeStreaming

/// Keyed noise and draws as the Python side recorded them.
@Suite struct SamplingTests {
    let recorded = try! Recorded("noise")

    @Test func everyUniformIsTheRecordedOne() {
        #expect(recorded.rows("seed") >= 300)
        for row in 0..<recorded.rows("seed") {
            let found = keyedUniform(
                seed: UInt64(recorded.int("seed", row)), position: UInt64(recorded.int("position", row)))
            #expect(found == recorded.doubles("uniform", row)[0])
        }
    }

    @Test func everyDrawIsTheRecordedOne() throws {
        for row in 0..<recorded.rows("draw_key") {
            let settings = recorded.doubles("draw_settings", row)
            let sampling = try Sampling(
                temperature: settings[0], topK: recorded.int("draw_top_k", row), topP: settings[1], minP: settings[2],
                seed: UInt64(recorded.int("draw_seed", row)))
            let logits = hashLogits(
                key: UInt64(recorded.int("draw_key", row)), rows: 1, vocabulary: recorded.int("draw_vocab", row),
                ties: recorded.int("draw_kind", row) == 1)
            logits.withRow(0) { logits in
                let probabilities = sampling.probabilities(logits)
                #expect(probabilities.indices.filter { probabilities[$0] > 0 } == recorded.ints("draw_support", row))
                #expect(abs((probabilities.max() ?? 0) - recorded.doubles("draw_largest", row)[0]) < 1e-12)
                let tokens = (0..<20).map { sampling.choose(logits, position: $0) }
                #expect(tokens == recorded.ints("draw_tokens", row), "case \(row)")
            }
        }
    }

    @Test func settingsOutOfRangeAreRefused() {
        #expect(throws: SpeculativeError.invalidSetting("top-p 0.0 must lie in (0, 1]")) { try Sampling(topP: 0) }
        #expect(throws: SpeculativeError.self) { try Sampling(temperature: 0) }
        #expect(throws: SpeculativeError.self) { try Sampling(minP: 1.5) }
        #expect(throws: SpeculativeError.self) { try Sampling(topK: -1) }
    }

    @Test func aUniformNearOneStaysInsideTheSupport() {
        #expect(draw(from: [0.25, 0.75, 0], uniform: 1) == 1)
        #expect(draw(from: [0, 1], uniform: 0) == 1)
    }
}
