#if canImport(CoreAI)
    import CoreAI
    import SpeculativeStreaming

    /// A function in all the assets that a model is divided into.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    typealias FunctionChain = PartChain<AssetFunction>

    /// One function of an asset, ready to run. Core AI runs it for several callers at a time.
    @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
    final class AssetFunction: PartFunction {
        /// The name of the keys and values among states and inputs.
        static let cache = "kv_cache"

        private let function: InferenceFunction

        init(_ function: InferenceFunction) { self.function = function }

        var inputNames: [String] { function.descriptor.inputNames }
        var outputNames: [String] { function.descriptor.outputNames }

        /// A fresh state. Throws `backEnd` when the function's one state is not `kv_cache`.
        func makeState() throws -> NDArray {
            guard function.descriptor.stateNames == [Self.cache],
                case .ndArray(let descriptor)? = function.descriptor.stateDescriptor(of: Self.cache)
            else { throw otherThanDescribed }
            return .zeros(descriptor)
        }

        /// Shape of the keys and values as an input. Throws `backEnd` for a function with a state, or without it.
        func cacheShape() throws -> [Int] {
            guard function.descriptor.stateNames.isEmpty,
                case .ndArray(let descriptor)? = function.descriptor.inputDescriptor(of: Self.cache)
            else { throw otherThanDescribed }
            return descriptor.shape
        }

        /// Runs the function once. Throws `backEnd` with Core AI's message.
        func run(_ inputs: [String: NDArray]) async throws -> [String: NDArray] {
            do {
                return taken(from: try await function.run(inputs: inputs))
            } catch {
                throw Self.failed(error)
            }
        }

        /// Runs the function once; changes its state in place. Throws `backEnd` with Core AI's message.
        func run(_ inputs: [String: NDArray], changing state: inout NDArray) async throws -> [String: NDArray] {
            do {
                var states = InferenceFunction.MutableViews()
                states.insert(&state, for: Self.cache)
                return taken(from: try await function.run(inputs: inputs, states: consume states))
            } catch {
                throw Self.failed(error)
            }
        }

        private func taken(from outputs: consuming InferenceFunction.Outputs) -> [String: NDArray] {
            var arrays: [String: NDArray] = [:]
            for name in outputNames {
                if let value = outputs.remove(name) { arrays[name] = value.ndArray }
            }
            return arrays
        }

        private static func failed(_ error: any Error) -> SpeculativeError {
            .backEnd("Core AI cannot run a function: \(oneLine(error))")
        }

        private var otherThanDescribed: SpeculativeError {
            .backEnd("function '\(function.descriptor.name)' keeps keys and values otherwise than the manifest says")
        }
    }
#endif
