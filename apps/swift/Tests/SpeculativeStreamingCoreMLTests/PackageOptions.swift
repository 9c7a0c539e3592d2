import SpeculativeStreamingCoreML
import TinyBundles

extension TinyBundle {
    /// Compiled packages are kept beside the bundles.
    var options: CoreMLOptions {
        let folder = bundle.url.deletingLastPathComponent().appendingPathComponent("compiled")
        return CoreMLOptions(cache: CompiledPackageCache(folder: folder))
    }
}
