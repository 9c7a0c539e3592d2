/// One turn of a conversation.
public struct ChatMessage: Sendable, Equatable, Codable {
    public enum Role: String, Sendable, Codable {
        case system, user, assistant
    }

    public let role: Role
    public let content: String

    public init(_ role: Role, _ content: String) {
        self.role = role
        self.content = content
    }
}

extension SpeculativeGenerator {
    /// Token ids of a conversation, with one beginning-of-text token where the base has one, even where its chat
    /// template writes it too.
    public nonisolated func tokens(of messages: [ChatMessage]) throws -> [Int] {
        let ids = try tokenizer.encode(chat: messages)
        guard let bos = architecture.bosId, ids.first != bos else { return ids }
        return [bos] + ids
    }

    /// Streams the assistant's next message.
    public nonisolated func stream(
        _ messages: [ChatMessage], options: GenerationOptions = GenerationOptions()
    ) -> AsyncThrowingStream<GenerationStep, any Error> {
        stream({ try self.tokens(of: messages) }, options)
    }
}
