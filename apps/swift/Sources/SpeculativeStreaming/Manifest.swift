import Foundation

/// What the host needs to know of the base model.
public struct Architecture: Codable, Sendable, Equatable {
    public let family: String
    public let vocabSize: Int
    public let numLayers: Int?
    public let bosId: Int?
    public let eosIds: [Int]
}

/// What the host needs to know of an adapter's streams.
public struct SpeculativeConfig: Codable, Sendable, Equatable {
    /// `lossless` or `shared`.
    public let mode: String
    public let numStreams: Int
    /// Layers, from the last one down, in which streams run; the kept nodes alone enter the first of them.
    public let numMsaLayers: Int?
    public let mainAttendsStreams: Bool
    /// Rank of the bigram bias, 0 without one.
    public let bigramRank: Int
}

/// Where an adapter's Core ML or Core AI functions are and what sizes they were built for.
public struct StepFunctions: Codable, Sendable, Equatable {
    /// How keys and values are kept: `state`, which functions change, or `inputs`, whose new rows are outputs
    /// that the host writes.
    public enum Cache: String, Codable, Sendable {
        case state, inputs
    }

    /// Choices of the graph that the host has to know.
    public struct Graph: Codable, Sendable, Equatable {
        /// Nil from conversions that only know a state.
        public let cache: Cache?
    }

    /// Path of the package or asset inside the bundle.
    public let package: String
    /// Function names.
    public let prefill: String
    public let step: String
    /// Prompt tokens per prefill call.
    public let chunk: Int
    public let numNodes: Int
    public let numKept: Int
    public let context: Int
    /// Packages in the order in which they run, when the model is divided, `package` being the first.
    public let parts: [String]?
    /// How each of them is fed.
    public let chain: [PartLink]?
    /// Golden traces of the weights as the package stores them, where they differ from the base's.
    public let golden: String?
    /// `baked`, or `inputs`: functions that adapters share, to which the host would pass an adapter's tensors.
    public let lora: String?
    public let graph: Graph?

    public var cache: Cache { graph?.cache ?? .state }

    /// Paths of the packages inside the bundle, in the order in which they run.
    public var packages: [String] { parts.flatMap { $0.isEmpty ? nil : $0 } ?? [package] }
}

extension StepFunctions {
    /// What a step model over these functions takes.
    public func limits(_ config: SpeculativeConfig) -> StepLimits {
        StepLimits(numNodes: numNodes, numKept: numKept, numStreams: config.numStreams, context: context)
    }

    /// Throws `backEnd` for functions that take an adapter as an input.
    package func checkBaked(of adapter: BundledAdapter) throws {
        guard lora == "inputs" else { return }
        throw SpeculativeError.backEnd(
            "adapter '\(adapter.app)' is an input of its functions (ss-convert --lora inputs); "
                + "this library runs packages with --lora baked")
    }
}

/// How a part of a divided model is fed: by function, input → source. A source is an input of the whole function
/// or an output of the part before.
public struct PartLink: Codable, Sendable, Equatable {
    /// First layer, and the one behind the last.
    public let layers: [Int]
    public let prefill: [String: String]
    public let step: [String: String]
}

/// One application of a bundle.
public struct BundledAdapter: Codable, Sendable, Equatable {
    public let app: String
    public let config: SpeculativeConfig
    public let promptTemplate: String
    public let stopStrings: [String]
    public let maxTokens: Int
    public let numNodes: Int
    /// safetensors file with the bigram bias among others.
    public let tensorFile: String
    public let coreml: StepFunctions?
    public let coreai: StepFunctions?
    /// Path of the golden traces without extension.
    public let golden: String?
    /// safetensors file with a bigram bias that adapters share; nil: it is in `tensorFile`.
    public let bigramBiasFile: String?

    /// Path of the golden traces that its functions must replay, without extension; nil without any.
    public func golden(of functions: StepFunctions) -> String? { functions.golden ?? golden }

    /// The prompt text of a row of fields. Throws `missingTemplateField`.
    public func prompt(_ fields: [String: String]) throws -> String {
        try fillTemplate(promptTemplate, fields)
    }

    /// Names of the prompt template's fields in order of appearance, each once.
    public var promptFields: [String] {
        var names: [String] = []
        _ = try? scanTemplate(promptTemplate) { name in
            if !names.contains(name) { names.append(name) }
            return ""
        }
        return names
    }
}

/// Size and digest of one file of a bundle.
public struct BundledFile: Codable, Sendable, Equatable {
    public let bytes: Int
    public let sha256: String
}

/// Everything a bundle says of itself, as far as the host needs it (`ss_device/bundle.py`).
public struct Manifest: Codable, Sendable, Equatable {
    public static let formatVersion = 1

    public let architecture: Architecture
    public let adapters: [String: BundledAdapter]
    public let files: [String: BundledFile]

    /// Reads `manifest.json`. Throws `missingFile`, `unsupportedFormat` or `damagedFile`.
    init(contentsOf url: URL) throws {
        guard let data = try? Data(contentsOf: url) else {
            throw SpeculativeError.missingFile(path: url.path)
        }
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .custom { path in ManifestKey(path[path.count - 1].stringValue) }
        do {
            // The version comes first: another format may lack anything else.
            let found = try decoder.decode(Version.self, from: data).formatVersion
            guard found == Self.formatVersion else {
                throw SpeculativeError.unsupportedFormat(
                    path: url.path, found: found, supported: Self.formatVersion)
            }
            self = try decoder.decode(Manifest.self, from: data)
        } catch let error as DecodingError {
            throw SpeculativeError.damagedFile(path: url.path, reason: oneLine(error))
        }
    }

    private struct Version: Decodable {
        let formatVersion: Int
    }
}

/// A key of the manifest as Swift writes it: `num_nodes` is `numNodes`. Keys that bundles of earlier versions
/// were written with are read under today's names (`ss_device/old_names.py`).
private struct ManifestKey: CodingKey {
    private static let oldNames = ["markov_rank": "bigram_rank", "parent_bias_file": "bigram_bias_file"]

    let stringValue: String
    var intValue: Int? { nil }

    init(_ key: String) {
        let words = (Self.oldNames[key] ?? key).split(separator: "_")
        stringValue = words.prefix(1).joined() + words.dropFirst().map(\.capitalized).joined()
    }

    init?(stringValue: String) { self.stringValue = stringValue }
    init?(intValue: Int) { nil }
}

/// The place and the reason of a JSON error, on one line.
func oneLine(_ error: DecodingError) -> String {
    switch error {
    case .keyNotFound(let key, let context):
        return "no entry '\((context.codingPath + [key]).map(\.stringValue).joined(separator: "."))'"
    case .typeMismatch(_, let context), .valueNotFound(_, let context), .dataCorrupted(let context):
        let place = context.codingPath.map(\.stringValue).joined(separator: ".")
        return place.isEmpty ? "not valid JSON" : "wrong entry '\(place)'"
    @unknown default:
        return "not valid JSON"
    }
}

/// Fills `{field}` places; `{{` and `}}` are braces. Throws `missingTemplateField`.
func fillTemplate(_ template: String, _ fields: [String: String]) throws -> String {
    var names: [String] = []
    let text = try scanTemplate(template) { name in
        names.append(name)
        return fields[name] ?? ""
    }
    if let missing = names.first(where: { fields[$0] == nil }) {
        throw SpeculativeError.missingTemplateField(name: missing, expected: names)
    }
    return text
}

/// The template with every field replaced by what `value` says of its name.
private func scanTemplate(_ template: String, value: (String) -> String) throws -> String {
    var result = ""
    var rest = Substring(template)
    while let brace = rest.firstIndex(where: { $0 == "{" || $0 == "}" }) {
        result += rest[..<brace]
        let after = rest.index(after: brace)
        if after < rest.endIndex, rest[after] == rest[brace] {
            result.append(rest[brace])
            rest = rest[rest.index(after: after)...]
        } else if rest[brace] == "{", let end = rest.firstIndex(of: "}") {
            result += value(String(rest[after..<end]))
            rest = rest[rest.index(after: end)...]
        } else {
            throw SpeculativeError.invalidSetting("the prompt template has an unmatched brace: \(template)")
        }
    }
    return result + rest
}
