#if canImport(SwiftUI)
    import SpeculativeChatModel
    import SpeculativeStreaming
    import SwiftUI
    import UniformTypeIdentifiers

    /// The one window: a bundle and an adapter, the fields of its prompt, one or two answers.
    struct ChatView: View {
        @Bindable var model: ChatModel
        @State private var fields: [String: String] = [:]
        @State private var isChoosing = false
        /// The folder that the app may read, as long as it is shown.
        @State private var folder: URL?

        var body: some View {
            Form {
                source
                prompt
                answers
            }
            .formStyle(.grouped)
            .fileImporter(isPresented: $isChoosing, allowedContentTypes: [.folder]) { result in
                if case .success(let url) = result { open(url) }
            }
        }

        private var source: some View {
            Section("Bundle") {
                Button(folder?.lastPathComponent ?? "Choose a bundle folder …") { isChoosing = true }
                Picker("Adapter", selection: $model.adapter) {
                    ForEach(model.adapters, id: \.self) { Text($0).tag(String?.some($0)) }
                }
                .disabled(model.adapters.isEmpty || model.isRunning)
                Toggle("Also answer without drafts", isOn: $model.comparesWithPlain)
                if let problem = model.problem { Text(problem).foregroundStyle(.red) }
            }
        }

        private var prompt: some View {
            Section("Prompt") {
                ForEach(model.templateFields, id: \.self) { name in
                    TextField(name, text: binding(name), axis: .vertical)
                }
                HStack {
                    Button("Answer") { Task { await model.ask(fields) } }
                        .disabled(model.adapter == nil || model.isRunning)
                        .keyboardShortcut(.return, modifiers: .command)
                    Button("Stop", role: .cancel) { model.stop() }
                        .disabled(!model.isRunning)
                }
            }
        }

        /// Side by side where there is room, below each other elsewhere.
        private var answers: some View {
            Section("Answer") {
                ViewThatFits(in: .horizontal) {
                    HStack(alignment: .top) { panes }
                    VStack(alignment: .leading) { panes }
                }
            }
        }

        @ViewBuilder private var panes: some View {
            AnswerView(title: "Speculative", answer: model.speculative)
            if model.comparesWithPlain { AnswerView(title: "One token per call", answer: model.plain) }
        }

        private func binding(_ name: String) -> Binding<String> {
            Binding(get: { fields[name] ?? "" }, set: { fields[name] = $0 })
        }

        private func open(_ url: URL) {
            folder?.stopAccessingSecurityScopedResource()
            folder = url.startAccessingSecurityScopedResource() ? url : nil
            fields = [:]
            model.choose(url)
        }
    }

    /// One answer: accepted draft tokens on a tinted ground, the live counts below.
    struct AnswerView: View {
        let title: String
        let answer: Answer

        var body: some View {
            VStack(alignment: .leading, spacing: 8) {
                Text(title).font(.headline)
                Text(highlighted).textSelection(.enabled).frame(minWidth: 260, alignment: .leading)
                Text(counts).font(.caption).monospacedDigit().foregroundStyle(.secondary)
            }
        }

        private var highlighted: AttributedString {
            answer.segments.reduce(into: AttributedString()) { text, segment in
                var part = AttributedString(segment.text)
                if segment.isDrafted { part.backgroundColor = Color.accentColor.opacity(0.25) }
                text += part
            }
        }

        private var counts: String {
            let counts = answer.statistics
            let perSecond = counts.tokensPerSecond.map { String(format: "%.1f tokens/s", $0) } ?? "–"
            let perCall = counts.tokensPerCall.map { String(format: "%.2f tokens per call", $0) } ?? "–"
            return "\(counts.generatedTokens) tokens, \(perSecond), \(perCall)"
        }
    }
#endif
