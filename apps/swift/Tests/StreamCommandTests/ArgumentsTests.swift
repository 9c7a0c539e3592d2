import SpeculativeStreaming
import Testing

@testable import ss_stream

/// What the words of a command line mean.
@Suite struct ArgumentsTests {
    private func parse(_ options: String) throws -> Arguments {
        try Arguments(["bundle", "--tokens", "1 2"] + options.split(separator: " ").map(String.init))
    }

    /// The line that refuses these options, without what every refusal ends with; nil when they are taken.
    private func refusal(_ options: String) -> String? {
        do {
            _ = try parse(options)
            return nil
        } catch {
            let line = (error as? SpeculativeError)?.description ?? "\(error)"
            let end = " (see ss-stream --help)"
            return line.hasSuffix(end) ? String(line.dropLast(end.count)) : line
        }
    }

    @Test func withoutSamplingOptionsDecodingIsGreedy() throws {
        #expect(try parse("").sampler() == .greedy)
        #expect(try parse("--temp 0").sampler() == .greedy)
        #expect(try parse("--temp 0 --seed 4").sampler() == .greedy)
    }

    @Test func samplingOptionsAreThoseOfTheSampler() throws {
        #expect(try parse("--temp 0.7").sampler() == .sampling(Sampling(temperature: 0.7)))
        #expect(try parse("--temp 1 --top-k 5").sampler() == .sampling(Sampling(topK: 5)))
        #expect(try parse("--top-p 0.9 --temp 1").sampler() == .sampling(Sampling(topP: 0.9)))
        #expect(
            try parse("--temp 2 --top-k 7 --top-p 0.5 --min-p 0.1 --seed 18446744073709551615").sampler()
                == .sampling(Sampling(temperature: 2, topK: 7, topP: 0.5, minP: 0.1, seed: .max)))
    }

    @Test func treesHaveATopKOfTheirOwn() throws {
        let tree = try parse("--shape k-ary --tree-top-k 4")
        #expect(tree.shape == .kAry)
        #expect(tree.treeTopK == 4)
        #expect(try tree.sampler() == .greedy)
        let both = try parse("--shape k-ary --tree-top-k 2 --temp 1 --top-k 9")
        #expect(both.treeTopK == 2)
        #expect(try both.sampler() == .sampling(Sampling(topK: 9)))
        #expect(try parse("--temp 1 --top-k 9").treeTopK == 3)
    }

    @Test func backEndsAndComputeUnitsHaveNames() throws {
        #expect(try parse("").backEnd == nil)
        #expect(try parse("--backend coreai").backEnd == .coreai)
        #expect(try parse("--backend coreml --compute-units ane").computeUnits == .ane)
        #expect(refusal("--backend mlx") == "back end 'mlx' is not coreml or coreai")
        #expect(refusal("--compute-units tpu") == "compute units 'tpu' are not all, ane, gpu or cpu")
    }

    @Test func formerNamesAreRefused() {
        #expect(refusal("--temperature 0.7") == "unknown option '--temperature'")
        #expect(refusal("--temp 1 --sample-top-k 5") == "unknown option '--sample-top-k'")
        #expect(
            refusal("--shape k-ary --top-k 4")
                == "--top-k, --top-p and --min-p need --temp above 0; k of a k-ary tree is --tree-top-k")
    }

    @Test func valuesThatCannotBeAreNamed() {
        #expect(refusal("--temp warm") == "--temp: 'warm' is not a finite number")
        #expect(refusal("--temp inf") == "--temp: 'inf' is not a finite number")
        #expect(refusal("--temp -1") == "--temp: -1.0 must not be negative (0 is greedy)")
        #expect(refusal("--temp 1 --top-k many") == "--top-k: 'many' is not a whole number")
        #expect(refusal("--temp 1 --top-k -1") == "top-k -1 must not be negative")
        #expect(refusal("--temp 1 --top-p 2") == "top-p 2.0 must lie in (0, 1]")
        #expect(refusal("--tree-top-k 0") == "--tree-top-k: '0' is not a number above 0")
        #expect(refusal("--temp") == "--temp needs a value")
        #expect(refusal("--shape bushy") == "tree shape 'bushy' is not best-first, chain or k-ary")
    }

    /// An option that is read is one that the help names, and the other way round.
    @Test func theHelpNamesEveryOption() throws {
        let named = Arguments.usage.split { !$0.isLetter && $0 != "-" }.filter { $0.hasPrefix("--") }.map(String.init)
        for option in Set(named).subtracting(["--record"]).sorted() {
            #expect(refusal(option) != "unknown option '\(option)'", "\(option) is named, not read")
        }
        for option in Arguments.options { #expect(named.contains(option), "\(option) is read, not named") }
    }
}
