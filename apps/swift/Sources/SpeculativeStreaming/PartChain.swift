/// A function that is one part of a model, or all of it.
package protocol PartFunction: AnyObject, Sendable {
    var inputNames: [String] { get }
    var outputNames: [String] { get }
}

/// One function of a model in all the packages that it is divided into, in the order in which they run; most
/// models have one package.
package struct PartChain<Function: PartFunction>: Sendable {
    package struct Link: Sendable {
        package let function: Function
        /// Input → source: an input of the whole function, or an output of the link before (the manifest's
        /// `chain`). Nil for the only link, which takes the whole function's inputs as they are.
        package let feeds: [String: String]?

        package init(function: Function, feeds: [String: String]?) {
            self.function = function
            self.feeds = feeds
        }
    }

    package let links: [Link]

    package init(links: [Link]) { self.links = links }

    /// Throws `backEnd` naming an input that neither the whole function's `inputs` nor the link before feed.
    ///
    /// - Parameter own: inputs that every link is given by itself.
    package func check(inputs: Set<String>, own: Set<String> = []) throws {
        var passed: Set<String> = []
        for (part, link) in links.enumerated() {
            for input in link.function.inputNames.sorted() where !own.contains(input) {
                let source = link.feeds.map { $0[input] } ?? input
                guard let source, inputs.union(passed).contains(source) else {
                    throw SpeculativeError.backEnd(
                        "part \(part + 1) of the model has an input '\(input)' that the manifest's chain does not feed")
                }
            }
            passed = Set(link.function.outputNames)
        }
    }
}

extension StepFunctions {
    /// Both functions in all packages. `load` gives the function of a name in a package.
    package func chains<Function: PartFunction>(
        isolation: isolated (any Actor)? = #isolation,
        load: (_ package: String, _ function: String) async throws -> Function
    ) async throws -> (prefill: PartChain<Function>, step: PartChain<Function>) {
        var (prefill, step) = ([PartChain<Function>.Link](), [PartChain<Function>.Link]())
        for (part, package) in packages.enumerated() {
            let feeds = packages.count > 1 ? chain?[part] : nil
            prefill.append(.init(function: try await load(package, self.prefill), feeds: feeds?.prefill))
            step.append(.init(function: try await load(package, self.step), feeds: feeds?.step))
        }
        return (PartChain(links: prefill), PartChain(links: step))
    }
}
