#if canImport(CoreML)
    import CoreML
    import Foundation
    import SpeculativeStreaming

    /// Compiles packages on the device and keeps the results, named by the package's content.
    public struct CompiledPackageCache: Sendable, Hashable {
        public let folder: URL

        /// - Parameter folder: nil for `SpeculativeStreaming` in the user's caches folder, which the system may
        ///   empty when space is short; a package is then compiled again.
        public init(folder: URL? = nil) {
            self.folder = folder ?? FileManager.default.urls(for: .cachesDirectory, in: .userDomainMask)[0]
                .appendingPathComponent("SpeculativeStreaming")
        }

        /// The compiled form of a bundle's package, compiled now if it never was.
        ///
        /// Throws `backEnd` with Core ML's message when it does not compile.
        public func compiled(_ package: String, of bundle: SpeculativeBundle) async throws -> URL {
            let source = bundle.url.appendingPathComponent(package)
            let target = folder.appendingPathComponent(bundle.contentDigest(of: package) + ".mlmodelc")
            if FileManager.default.fileExists(atPath: target.path) { return target }
            do {
                let fresh = try await MLModel.compileModel(at: source)
                try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
                do {
                    // A rename, so that a folder of that name is always whole.
                    try FileManager.default.moveItem(at: fresh, to: target)
                } catch where FileManager.default.fileExists(atPath: target.path) {
                    try? FileManager.default.removeItem(at: fresh)  // someone else was first
                }
                return target
            } catch {
                throw SpeculativeError.backEnd("\(source.path): Core ML cannot compile it: \(oneLine(error))")
            }
        }
    }
#endif
