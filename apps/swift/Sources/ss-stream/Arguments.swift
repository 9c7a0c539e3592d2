import Foundation
import SpeculativeStreaming

/// The command line, checked.
struct Arguments {
    enum Mode: String { case generate, validate, bench, benchHost }
    enum BackEnd: String { case coreml, coreai }

    var mode = Mode.generate
    var bundle: URL?
    var adapter: String?
    var prompt: String?
    var fields: [String: String] = [:]
    var tokens: [[Int]] = []
    var maxTokens: Int?
    var nodes: Int?
    var shape = Drafter.Shape.bestFirst
    var treeTopK = 3
    /// 0: greedy.
    var temp = 0.0
    var topK: Int?
    var topP: Double?
    var minP: Double?
    var seed: UInt64 = 0
    /// nil: what the bundle has, Core ML first.
    var backEnd: BackEnd?
    var computeUnits = ComputeUnits.all
    var cache: URL?
    var maxSteps: Int?
    var traces: URL?
    var vocabulary = 32_000
    var check = false
    var json = false
    var help = false

    static let usage = """
        usage: ss-stream BUNDLE [--adapter NAME] PROMPT [options]     stream an answer
               ss-stream BUNDLE [--adapter NAME] --validate           replay the bundle's golden traces
               ss-stream BUNDLE [--adapter NAME] --bench PROMPT       time per call against nodes, with and without drafts
               ss-stream --bench-host [--vocabulary V] [--nodes N]    the host's own time per step, no model

        PROMPT is one of
          --prompt TEXT          taken as it is (Apple platforms; elsewhere there is no tokenizer)
          --field NAME=VALUE     a field of the application's prompt template, once per field
          --tokens "1 2 3"       token ids, taken as they are
          --tokens-file FILE     one JSON array of token ids per line

        options
          --adapter NAME         which of the bundle's adapters (default: the only one)
          --max-tokens N         default: the application's
          --nodes N              tree nodes per call (default: the bundle's)
          --plain                no drafts: one token per call
          --shape SHAPE          best-first, chain or k-ary; --tree-top-k K children per node of a k-ary tree
          --temp T               above 0: sample; with --top-k K, --top-p P, --min-p P, --seed N
          --backend BACKEND      coreml or coreai (default: what the bundle has, coreml first)
          --compute-units UNITS  all, ane, gpu or cpu; with coreai ane and gpu are what is preferred
          --cache FOLDER         where compiled packages are kept
          --max-steps N          of each trace with --validate
          --traces FOLDER        what ss-validate --record wrote, with --validate
          --check                compare the checksum of every file of the bundle first
          --json                 one JSON object per prompt or report

        example: ss-stream build/sqlctx --field question='How many libraries are there?' --field context='CREATE TABLE library (name VARCHAR)'
        """

    /// Throws `invalidSetting` with one line for anything that does not fit.
    init(_ words: [String]) throws {
        var rest = words[...]
        while let word = rest.popFirst() {
            guard word.hasPrefix("--") else {
                guard bundle == nil else { throw bad("unexpected argument '\(word)'") }
                bundle = URL(fileURLWithPath: word)
                continue
            }
            if try !readFlag(word) { try readOption(word, &rest) }
        }
        if !help { try checkRequest() }
    }

    private mutating func readFlag(_ word: String) throws -> Bool {
        switch word {
        case "--validate": try choose(.validate)
        case "--bench": try choose(.bench)
        case "--bench-host": try choose(.benchHost)
        case "--plain":
            guard nodes == nil else { throw bad("--plain is one node per call; leave --nodes out") }
            nodes = 1
        case "--check": check = true
        case "--json": json = true
        case "--help": help = true
        default: return false
        }
        return true
    }

    private mutating func readOption(_ word: String, _ rest: inout ArraySlice<String>) throws {
        guard Self.options.contains(word) else { throw bad("unknown option '\(word)'") }
        guard let value = rest.popFirst() else { throw bad("\(word) needs a value") }
        switch word {
        case "--adapter": adapter = value
        case "--prompt": prompt = value
        case "--field": try readField(value)
        case "--tokens": tokens.append(try tokenList(value))
        case "--tokens-file": tokens += try tokenFile(value)
        case "--max-tokens": maxTokens = try positive(word, value)
        case "--nodes":
            guard nodes == nil else { throw bad("--plain is one node per call; leave --nodes out") }
            nodes = try positive(word, value)
        case "--shape":
            guard let known = Drafter.Shape(rawValue: value) else {
                throw bad("tree shape '\(value)' is not best-first, chain or k-ary")
            }
            shape = known
        case "--tree-top-k": treeTopK = try positive(word, value)
        case "--backend":
            guard let known = BackEnd(rawValue: value) else { throw bad("back end '\(value)' is not coreml or coreai") }
            backEnd = known
        case "--compute-units":
            guard let known = ComputeUnits(rawValue: value) else {
                throw bad("compute units '\(value)' are not all, ane, gpu or cpu")
            }
            computeUnits = known
        case "--cache": cache = URL(fileURLWithPath: value)
        case "--max-steps": maxSteps = try positive(word, value)
        case "--traces": traces = URL(fileURLWithPath: value)
        case "--vocabulary": vocabulary = try positive(word, value)
        default: try readSampling(word, value)
        }
    }

    private mutating func readSampling(_ word: String, _ value: String) throws {
        switch word {
        case "--top-k":
            guard let number = Int(value) else { throw bad("--top-k: '\(value)' is not a whole number") }
            topK = number
        case "--seed":
            guard let number = UInt64(value) else { throw bad("--seed: '\(value)' is not a number from 0 to 2^64 - 1") }
            seed = number
        default:
            guard let number = Double(value), number.isFinite else {
                throw bad("\(word): '\(value)' is not a finite number")
            }
            if word == "--temp" { temp = number }
            if word == "--top-p" { topP = number }
            if word == "--min-p" { minP = number }
        }
    }

    static let options: Set = [
        "--adapter", "--prompt", "--field", "--tokens", "--tokens-file", "--max-tokens", "--nodes", "--shape",
        "--tree-top-k", "--backend", "--temp", "--top-k", "--top-p", "--min-p", "--seed", "--compute-units", "--cache",
        "--max-steps", "--traces", "--vocabulary",
    ]

    /// The sampler asked for. Throws `invalidSetting` for a value out of range, or one that greedy decoding ignores.
    func sampler() throws -> Sampler {
        guard temp != 0 else {
            guard topK == nil, topP == nil, minP == nil else {
                throw bad("--top-k, --top-p and --min-p need --temp above 0; k of a k-ary tree is --tree-top-k")
            }
            return .greedy
        }
        guard temp > 0 else { throw bad("--temp: \(temp) must not be negative (0 is greedy)") }
        return .sampling(
            try Sampling(temperature: temp, topK: topK ?? 0, topP: topP ?? 1, minP: minP ?? 0, seed: seed))
    }

    private mutating func choose(_ other: Mode) throws {
        guard mode == .generate else { throw bad("only one of --validate, --bench and --bench-host") }
        mode = other
    }

    private func checkRequest() throws {
        guard traces == nil || mode == .validate else { throw bad("--traces is for --validate") }
        guard mode != .benchHost else { return }
        guard bundle != nil else { throw bad("a bundle folder is needed") }
        let prompts = [prompt != nil, !fields.isEmpty, !tokens.isEmpty].count { $0 }
        if mode != .validate, prompts != 1 {
            throw bad("exactly one kind of prompt is needed: --prompt, --field, --tokens or --tokens-file")
        }
        _ = try sampler()
    }

    private mutating func readField(_ text: String) throws {
        guard let equals = text.firstIndex(of: "=") else { throw bad("--field: '\(text)' is not NAME=VALUE") }
        fields[String(text[..<equals])] = String(text[text.index(after: equals)...])
    }

    private func tokenList(_ text: String) throws -> [Int] {
        try text.split(whereSeparator: { $0 == " " || $0 == "," }).map { part in
            guard let id = Int(part), id >= 0 else { throw bad("--tokens: '\(part)' is not a token id") }
            return id
        }
    }

    private func tokenFile(_ path: String) throws -> [[Int]] {
        guard let text = try? String(contentsOfFile: path, encoding: .utf8) else {
            throw SpeculativeError.missingFile(path: path)
        }
        return try text.split(separator: "\n").enumerated().map { number, line in
            guard let ids = try? JSONDecoder().decode([Int].self, from: Data(line.utf8)), ids.allSatisfy({ $0 >= 0 })
            else { throw bad("\(path):\(number + 1): not a JSON array of token ids") }
            return ids
        }
    }

    private func positive(_ word: String, _ value: String) throws -> Int {
        guard let number = Int(value), number >= 1 else { throw bad("\(word): '\(value)' is not a number above 0") }
        return number
    }

    private func bad(_ text: String) -> SpeculativeError {
        .invalidSetting("\(text) (see ss-stream --help)")
    }
}
