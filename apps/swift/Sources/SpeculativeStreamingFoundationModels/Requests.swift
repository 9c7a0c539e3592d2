#if canImport(FoundationModels) && (compiler(>=6.4) || os(Linux))
    import FoundationModels
    import SpeculativeStreaming

    /// A transcript as messages for the chat template. Reasoning is left out; throws
    /// `LanguageModelError.unsupportedTranscriptContent` for anything else than text.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
    @available(tvOS, unavailable)
    func chatMessages(of transcript: Transcript) throws -> [ChatMessage] {
        try transcript.compactMap { entry in
            switch entry {
            case .instructions(let instructions):
                return ChatMessage(.system, try text(of: instructions.segments, in: entry))
            case .prompt(let prompt):
                return ChatMessage(.user, try text(of: prompt.segments, in: entry))
            case .response(let response):
                return ChatMessage(.assistant, try text(of: response.segments, in: entry))
            case .reasoning:
                return nil
            default:
                throw unsupported(entry)
            }
        }
    }

    @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
    @available(tvOS, unavailable)
    private func text(of segments: [Transcript.Segment], in entry: Transcript.Entry) throws -> String {
        try segments.map { segment in
            guard case .text(let text) = segment else { throw unsupported(entry) }
            return text.content
        }.joined(separator: "\n")
    }

    @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
    @available(tvOS, unavailable)
    private func unsupported(_ entry: Transcript.Entry) -> LanguageModelError {
        .unsupportedTranscriptContent(
            .init(
                unsupportedContent: [entry],
                debugDescription: "this model takes text alone: no tools, no attachments"))
    }

    /// The sampler that options ask for. Without a mode: greedy, unless a temperature above 0 is given. Throws
    /// `invalidSetting` for values out of range.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, visionOS 27.0, *)
    @available(tvOS, unavailable)
    func sampler(of options: FoundationModels.GenerationOptions) throws -> Sampler {
        let temperature = options.temperature
        guard temperature != 0 else { return .greedy }
        switch options.samplingMode?.kind {
        case nil:
            guard let temperature else { return .greedy }
            return .sampling(try Sampling(temperature: temperature, seed: freshSeed()))
        case .greedy:
            return .greedy
        case .randomTopK(let k, let seed):
            return .sampling(try Sampling(temperature: temperature ?? 1, topK: k, seed: seed ?? freshSeed()))
        case .randomProbabilityThreshold(let p, let seed):
            return .sampling(try Sampling(temperature: temperature ?? 1, topP: p, seed: seed ?? freshSeed()))
        @unknown default:
            throw SpeculativeError.invalidSetting("this way of sampling is not known here")
        }
    }

    private func freshSeed() -> UInt64 { .random(in: .min ... .max) }
#endif
