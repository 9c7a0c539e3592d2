import CoreML
import SpeculativeStreaming
import Testing
import TinyBundles

@testable import SpeculativeStreamingCoreML

/// The step function's inputs in multi arrays.
@Suite struct StepInputTests {
    @Test func everyInputIsTheRecordedOne() throws {
        let recorded = try RecordedInputs()
        #expect(recorded.cases.count == 20)
        for (number, expected) in recorded.cases.enumerated() {
            let features = try recorded.filled(number, MultiArrayInput.self).features
            for (name, integers) in expected.integers {
                let found = try features.featureValue(for: name)?.multiArrayValue?.readIntegers()
                #expect(found ?? [] == integers, "\(name) of case \(number)")
            }
            let mask = try #require(features.featureValue(for: "mask")?.multiArrayValue).readLogits().values
            #expect(mask.map { $0 == 0 } == expected.shows, "mask of case \(number)")
            #expect(mask.allSatisfy { $0 == 0 || $0 == -10_000 })
        }
    }
}
