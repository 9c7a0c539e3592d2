#if canImport(CoreAI)
    import CoreAI
    import Foundation
    import SpeculativeStreaming
    import Testing
    import TinyBundles

    @testable import SpeculativeStreamingCoreAI

    /// Bundles with something missing or changed: one readable line each.
    @Suite(.serialized, .enabled(if: TinyBundle.hasAssets, "coreai-core is not installed: the bundles have no assets"))
    struct DamageTests {
        private static let asset = "coreai/tiny-base.aimodel"

        /// What opening a copy of the bundle, or its adapter's functions, says after `change`.
        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        private func refusal(_ change: (_ copy: URL) throws -> Void, checking: Bool = false) async throws -> String? {
            let copy = try TinyBundle("coreai").changed(change)
            defer { withExtendedLifetime(copy) {} }
            do {
                let bundle = try SpeculativeBundle(contentsOf: copy.url, verifyingChecksums: checking)
                _ = try await CoreAIStepModel.open(bundle.adapter("tiny"), of: bundle, store: AssetStore())
                return nil
            } catch {
                return (error as? SpeculativeError)?.description.replacingOccurrences(of: copy.url.path, with: "BUNDLE")
            }
        }

        private func editFunctions(_ copy: URL, _ change: (inout [String: Any]) -> Void) throws {
            let file = copy.appendingPathComponent("manifest.json")
            let found = try JSONSerialization.jsonObject(with: Data(contentsOf: file)) as? [String: Any]
            var manifest = try #require(found)
            var adapters = try #require(manifest["adapters"] as? [String: Any])
            var tiny = try #require(adapters["tiny"] as? [String: Any])
            var functions = try #require(tiny["coreai"] as? [String: Any])
            change(&functions)
            tiny["coreai"] = functions
            adapters["tiny"] = tiny
            manifest["adapters"] = adapters
            try JSONSerialization.data(withJSONObject: manifest).write(to: file)
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func anUnchangedCopyOpens() async throws {
            #expect(try await refusal({ _ in }) == nil)
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func aMissingAssetIsNamed() async throws {
            let says = try await refusal { copy in
                try FileManager.default.removeItem(at: copy.appendingPathComponent(Self.asset))
            }
            #expect(says?.hasPrefix("BUNDLE/\(Self.asset)/") == true)
            #expect(says?.hasSuffix(": no such file") == true)
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func aChangedAssetIsNamed() async throws {
            let file = Self.asset + "/main.mlirb"
            let change: (URL) throws -> Void = { copy in
                let place = copy.appendingPathComponent(file)
                var bytes = try Data(contentsOf: place)
                bytes.replaceSubrange(0..<64, with: Data(repeating: 0, count: 64))
                try bytes.write(to: place)
            }
            #expect(
                try await refusal(change, checking: true)
                    == "file '\(file)' of the bundle was changed after the conversion (sha256 differs)")
            let says = try #require(try await refusal(change))
            #expect(says.hasPrefix("BUNDLE/\(Self.asset): Core AI cannot load it: "))
            #expect(!says.contains("\n"))
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func anAssetWithoutTheFunctionIsNamed() async throws {
            let says = try await refusal { try editFunctions($0) { $0["step"] = "missing_step" } }
            #expect(says == "BUNDLE/\(Self.asset): has no function 'missing_step'")
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func aCacheOfAnotherKindThanDescribedIsNamed() async throws {
            let says = try await refusal { try editFunctions($0) { $0["graph"] = ["cache": "inputs"] } }
            #expect(says == "function 'tiny_step' keeps keys and values otherwise than the manifest says")
        }

        @available(macOS 27.0, iOS 27.0, watchOS 27.0, tvOS 27.0, visionOS 27.0, *)
        @Test func adaptersThatAreInputsAndBundlesWithoutAssetsAreRefused() async throws {
            let says = try await refusal { try editFunctions($0) { $0["lora"] = "inputs" } }
            #expect(says?.hasSuffix("this library runs packages with --lora baked") == true)
            let other = try TinyBundle("bundle").bundle
            let none = SpeculativeError.noCoreAIAsset(adapter: "tiny")
            #expect(
                none.description == "adapter 'tiny' has no Core AI asset in this bundle (ss-convert --target coreai)")
            await #expect(throws: none) { _ = try await CoreAIStepModel.open(other.adapter(), of: other) }
        }
    }
#endif
