#if canImport(SwiftUI)
    import SpeculativeChatModel
    import SpeculativeStreaming
    import SpeculativeStreamingCoreML
    import SpeculativeStreamingTokenizers
    import SwiftUI

    /// Answers with a bundle's adapter and shows which words were drafted.
    @main
    struct SpeculativeChatApp: App {
        @State private var model = ChatModel { bundle, adapter in
            let tokenizer = try await TransformersTokenizer(bundle: bundle)
            return try await SpeculativeGenerator(coreML: bundle, adapter: adapter, tokenizer: tokenizer)
        }

        var body: some Scene {
            WindowGroup("Speculative Chat") {
                ChatView(model: model)
            }
        }
    }
#endif
