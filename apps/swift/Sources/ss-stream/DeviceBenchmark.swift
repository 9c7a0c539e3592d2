import Foundation
import SpeculativeStreaming
import SpeculativeStreamingCoreML

/// What `--bench` reports.
struct DeviceReport: Encodable {
    struct Run: Encodable {
        let nodes: Int
        let millisecondsPerCall: Double
        let tokensPerCall: Double
        let tokensPerSecond: Double
    }

    let promptTokens: Int
    /// One node per call is plain decoding in the same runtime.
    var runs: [Run] = []
    var placement: [ComputePlacement] = []
    var placementUnavailable: String?
}

extension Session {
    /// Time per call against nodes and tokens per second, with and without drafts, after one warm-up each.
    func bench() async throws {
        guard let prompt = try prompts().first else { throw SpeculativeError.emptyPrompt }
        let generator = try await generator()
        var report = DeviceReport(promptTokens: prompt.count)
        let largest = arguments.nodes ?? adapter.numNodes
        for nodes in [1, 4, 8, 12, 16, 24, 32, 48, 64].filter({ $0 < largest }) + [largest] {
            let request = GenerationOptions(
                maxTokens: arguments.maxTokens ?? 64, numNodes: nodes, sampler: try arguments.sampler())
            _ = try await generator.generate(tokens: prompt, options: request)
            let counts = try await generator.generate(tokens: prompt, options: request).statistics
            guard let perCall = counts.tokensPerCall, let perSecond = counts.tokensPerSecond else { continue }
            report.runs.append(
                DeviceReport.Run(
                    nodes: nodes, millisecondsPerCall: 1000 * counts.decodeSeconds / Double(counts.calls),
                    tokensPerCall: perCall, tokensPerSecond: perSecond))
        }
        do {
            report.placement = try await placement()
        } catch let error as SpeculativeError {
            report.placementUnavailable = error.description
        }
        if arguments.json { try printJSON(report) } else { show(report) }
    }

    /// Where the functions are to run, as far as the system says it.
    private func placement() async throws -> [ComputePlacement] {
        guard case .coreML(let options, let functions) = backEnd else {
            throw SpeculativeError.backEnd("Core AI does not say where it runs what (Instruments does)")
        }
        var plans: [ComputePlacement] = []
        for package in functions.packages {
            for name in [functions.prefill, functions.step] {
                plans.append(try await ComputePlacement.plan(name, in: package, of: bundle, options: options))
            }
        }
        return plans
    }

    private func show(_ report: DeviceReport) {
        print("nodes   ms per call   tokens per call   tokens per second")
        for run in report.runs {
            print(
                String(
                    format: "%5d %13.2f %17.2f %19.1f", run.nodes, run.millisecondsPerCall, run.tokensPerCall,
                    run.tokensPerSecond))
        }
        for placement in report.placement {
            let devices = placement.devices.sorted { $0.key < $1.key }.map {
                "\($0.key): \($0.value.operations) operations, \(String(format: "%.0f %%", 100 * $0.value.cost))"
            }
            print("\(placement.package), \(placement.function): \(devices.joined(separator: "; "))")
        }
        if let reason = report.placementUnavailable { print(reason) }
    }
}
