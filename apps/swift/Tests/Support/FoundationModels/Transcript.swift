import Foundation

public struct Transcript: Sendable, RandomAccessCollection {
    public struct TextSegment: Sendable {
        public let id: String
        public let content: String

        public init(id: String = UUID().uuidString, content: String) { (self.id, self.content) = (id, content) }
    }

    public struct AttachmentSegment: Sendable {
        public let id: String
    }

    public enum Segment: Sendable {
        case text(TextSegment)
        case attachment(AttachmentSegment)
    }

    public struct ToolDefinition: Sendable {
        public let name: String
    }

    public struct Instructions: Sendable {
        public let id: String
        public var segments: [Segment]
        public var toolDefinitions: [ToolDefinition]

        public init(id: String = UUID().uuidString, segments: [Segment], toolDefinitions: [ToolDefinition]) {
            (self.id, self.segments, self.toolDefinitions) = (id, segments, toolDefinitions)
        }
    }

    public struct Prompt: Sendable {
        public let id: String
        public var segments: [Segment]

        public init(id: String = UUID().uuidString, segments: [Segment]) { (self.id, self.segments) = (id, segments) }
    }

    public struct Response: Sendable {
        public let id: String
        public var segments: [Segment]

        public init(id: String = UUID().uuidString, segments: [Segment]) { (self.id, self.segments) = (id, segments) }
    }

    public struct Reasoning: Sendable {
        public let id: String
        public var segments: [Segment]
    }

    public struct ToolOutput: Sendable {
        public let id: String
        public var toolName: String
        public var segments: [Segment]

        public init(id: String, toolName: String, segments: [Segment]) {
            (self.id, self.toolName, self.segments) = (id, toolName, segments)
        }
    }

    public enum Entry: Sendable {
        case instructions(Instructions)
        case prompt(Prompt)
        case response(Response)
        case reasoning(Reasoning)
        case toolOutput(ToolOutput)
    }

    private var entries: [Entry]

    public init(entries: some Sequence<Entry> = []) { self.entries = Array(entries) }

    public var startIndex: Int { 0 }
    public var endIndex: Int { entries.count }
    public subscript(index: Int) -> Entry { entries[index] }

    mutating func append(_ entry: Entry) { entries.append(entry) }
}
