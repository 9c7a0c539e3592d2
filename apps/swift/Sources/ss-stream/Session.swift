import Foundation
import SpeculativeStreaming

#if canImport(SpeculativeStreamingTokenizers)
    import SpeculativeStreamingTokenizers
#endif

/// A bundle, one of its adapters and what the command line asks of them.
struct Session {
    let arguments: Arguments
    let bundle: SpeculativeBundle
    let adapter: BundledAdapter
    let tokenizer: any TextTokenizer
    let backEnd: BackEnd

    /// Opens the bundle. Throws before any heavy work for a request that cannot be served.
    init(_ arguments: Arguments) async throws {
        self.arguments = arguments
        bundle = try SpeculativeBundle(
            contentsOf: arguments.bundle ?? URL(fileURLWithPath: "."), verifyingChecksums: arguments.check)
        adapter = try bundle.adapter(arguments.adapter)
        #if canImport(SpeculativeStreamingTokenizers)
            tokenizer = try await TransformersTokenizer(bundle: bundle)
        #else
            tokenizer = try ByteLevelDecoder(tokenizerFile: bundle.url.appendingPathComponent("tokenizer.json"))
        #endif
        backEnd = try BackEnd(arguments, adapter)
    }

    /// Token ids of every prompt of the command line.
    func prompts() throws -> [[Int]] {
        if !arguments.tokens.isEmpty { return arguments.tokens }
        let text = try arguments.prompt ?? adapter.prompt(arguments.fields)
        let ids = try tokenizer.encode(text)
        return [bundle.manifest.architecture.bosId.map { [$0] + ids } ?? ids]
    }

    func drafter() throws -> Drafter {
        try bundle.drafter(
            for: adapter, numNodes: arguments.nodes, shape: arguments.shape, treeTopK: arguments.treeTopK)
    }

    func generator() async throws -> SpeculativeGenerator {
        SpeculativeGenerator(
            model: try await backEnd.model(adapter, of: bundle), bundle: bundle, adapter: adapter, drafter: try drafter(),
            tokenizer: tokenizer)
    }

    // MARK: - Generate

    struct Answer: Encodable {
        let text: String
        let tokenIds: [Int]
        let promptTokens: Int
        let generatedTokens: Int
        let steps: Int
        let tokensPerCall: Double?
        let seconds: [String: Double]
        let finishReason: String
    }

    func generate() async throws {
        let prompts = try prompts()
        try check(prompts)
        let generator = try await generator()
        let request = GenerationOptions(maxTokens: arguments.maxTokens, sampler: try arguments.sampler())
        for prompt in prompts {
            let answer = try await answer(prompt, generator, request)
            if arguments.json {
                try printJSON(answer)
            } else {
                show("\n")
                note(Self.summary(answer))
            }
        }
    }

    /// Refuses a prompt that does not fit before the package is loaded.
    private func check(_ prompts: [[Int]]) throws {
        let limits = backEnd.functions.limits(adapter.config)
        let vocabulary = bundle.manifest.architecture.vocabSize
        for prompt in prompts {
            try DecodingRequest(prompt: prompt, maxTokens: 1).check(
                limits, numNodes: arguments.nodes ?? adapter.numNodes)
            if let id = prompt.first(where: { $0 >= vocabulary }) {
                throw SpeculativeError.invalidSetting("token id \(id) is outside the vocabulary of \(vocabulary)")
            }
        }
    }

    private func answer(
        _ prompt: [Int], _ generator: SpeculativeGenerator, _ request: GenerationOptions
    ) async throws -> Answer {
        var (text, tokens, reason) = ("", [Int](), "")
        for try await step in generator.stream(tokens: prompt, options: request) {
            text += step.text
            tokens += step.tokens
            reason = step.finishReason?.rawValue ?? reason
            if !arguments.json { show(step.text) }
        }
        let counts = await generator.statistics
        return Answer(
            text: text, tokenIds: tokens, promptTokens: prompt.count, generatedTokens: tokens.count,
            steps: counts.calls, tokensPerCall: counts.tokensPerCall,
            seconds: ["prefill": counts.prefillSeconds, "decode": counts.decodeSeconds], finishReason: reason)
    }

    private static func summary(_ answer: Answer) -> String {
        let perCall = answer.tokensPerCall.map { String(format: "%.2f tokens per call", $0) } ?? "no call after the prompt's"
        return "\(answer.generatedTokens) tokens, \(answer.steps) calls after the prompt's, \(perCall); "
            + String(
                format: "prefill %.2f s, decode %.2f s", answer.seconds["prefill"] ?? 0, answer.seconds["decode"] ?? 0)
    }

    // MARK: - Validate

    private func traces() throws -> [Trace] {
        if let folder = arguments.traces {
            return try bundle.recordedTraces(of: adapter, for: backEnd.functions, in: folder)
        }
        guard let golden = adapter.golden(of: backEnd.functions) else {
            throw SpeculativeError.invalidSetting("adapter '\(adapter.app)' has no golden traces in this bundle")
        }
        return try GoldenTraces.load(stem: bundle.url.appendingPathComponent(golden))
    }

    func validate() async throws {
        let traces = try traces()
        let model = try await backEnd.model(adapter, of: bundle)
        var replay = Replay(model: model)
        let report = try await replay.run(traces, maxSteps: arguments.maxSteps)
        if arguments.json {
            try printJSON(report)
        } else {
            let psnr = report.psnr.map { String(format: "%.1f dB", $0) } ?? "equal"
            print(
                "\(report.tokenExact) of \(report.prompts) prompts token-exact, \(report.steps) steps, "
                    + "\(report.nodes) nodes, \(report.differences) differ (\(report.nearTies) near ties)")
            print(
                "stream logits: largest difference \(report.maxLogitDifference), PSNR \(psnr); "
                    + String(format: "%.2f tokens per call", report.tokensPerCall ?? 0))
        }
        if report.differences > report.nearTies { exit(1) }
    }
}
