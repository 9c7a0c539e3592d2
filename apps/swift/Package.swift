// swift-tools-version: 6.0
import PackageDescription

// Core ML, Core AI and SwiftUI exist on Apple platforms only. This manifest is a program that runs on the machine
// that builds: on Linux it leaves out what needs SwiftUI and adds stand-ins for the others, on which the tests run.
#if os(Linux)
    let isLinux = true
#else
    let isLinux = false
#endif

var dependencies: [Package.Dependency] = []
var coreML: [Target.Dependency] = ["SpeculativeStreaming"]
var coreAI: [Target.Dependency] = ["SpeculativeStreaming"]
var foundationModels: [Target.Dependency] = [
    "SpeculativeStreaming", "SpeculativeStreamingCoreML", "SpeculativeStreamingCoreAI",
]
var command: [Target.Dependency] = ["SpeculativeStreaming", "SpeculativeStreamingCoreML", "SpeculativeStreamingCoreAI"]
var products: [Product] = [
    .library(name: "SpeculativeStreaming", targets: ["SpeculativeStreaming"]),
    .library(name: "SpeculativeStreamingCoreML", targets: ["SpeculativeStreamingCoreML"]),
    .library(name: "SpeculativeStreamingCoreAI", targets: ["SpeculativeStreamingCoreAI"]),
    .library(name: "SpeculativeStreamingFoundationModels", targets: ["SpeculativeStreamingFoundationModels"]),
    .executable(name: "ss-stream", targets: ["ss-stream"]),
]
var targets: [Target] = []

if isLinux {
    coreML.append("CoreML")
    coreAI.append("CoreAI")
    foundationModels += ["CoreML", "CoreAI", "FoundationModels"]
    targets += [
        .target(name: "ModelServer", path: "Tests/Support/ModelServer"),
        .target(
            name: "CoreML", dependencies: ["ModelServer"], path: "Tests/Support/CoreML", exclude: ["README.md"]),
        .target(
            name: "CoreAI", dependencies: ["ModelServer"], path: "Tests/Support/CoreAI", exclude: ["README.md"]),
        .target(name: "FoundationModels", path: "Tests/Support/FoundationModels", exclude: ["README.md"]),
    ]
} else {
    dependencies.append(.package(url: "https://github.com/huggingface/swift-transformers", from: "1.0.0"))
    command.append("SpeculativeStreamingTokenizers")
    products += [
        .library(name: "SpeculativeStreamingTokenizers", targets: ["SpeculativeStreamingTokenizers"]),
        .library(name: "SpeculativeChatModel", targets: ["SpeculativeChatModel"]),
        .executable(name: "SpeculativeChat", targets: ["SpeculativeChat"]),
    ]
    targets += [
        .target(
            name: "SpeculativeStreamingTokenizers",
            dependencies: [
                "SpeculativeStreaming", .product(name: "Transformers", package: "swift-transformers"),
            ]),
        .executableTarget(
            name: "SpeculativeChat",
            dependencies: [
                "SpeculativeChatModel", "SpeculativeStreamingCoreML", "SpeculativeStreamingTokenizers",
            ]),
    ]
}

targets += [
    .target(name: "SpeculativeStreaming"),
    .target(name: "SpeculativeStreamingCoreML", dependencies: coreML),
    .target(name: "SpeculativeStreamingCoreAI", dependencies: coreAI),
    .target(name: "SpeculativeStreamingFoundationModels", dependencies: foundationModels),
    .target(name: "SpeculativeChatModel", dependencies: ["SpeculativeStreaming"]),
    .executableTarget(name: "ss-stream", dependencies: command),
    .testTarget(
        name: "SpeculativeStreamingTests", dependencies: ["SpeculativeStreaming", "SpeculativeChatModel"],
        resources: [.copy("Resources")]),
    .testTarget(name: "StreamCommandTests", dependencies: ["SpeculativeStreaming", "ss-stream"]),
    .target(
        name: "TinyBundles", dependencies: ["SpeculativeStreaming"], path: "Tests/Support/TinyBundles",
        resources: [.copy("Resources")]),
    .testTarget(
        name: "SpeculativeStreamingCoreMLTests",
        dependencies: coreML + ["SpeculativeStreamingCoreML", "TinyBundles"]),
    .testTarget(
        name: "SpeculativeStreamingCoreAITests",
        dependencies: coreAI + ["SpeculativeStreamingCoreAI", "TinyBundles"]),
    .testTarget(
        name: "SpeculativeStreamingFoundationModelsTests",
        dependencies: foundationModels + ["SpeculativeStreamingFoundationModels", "TinyBundles"]),
]

let package = Package(
    name: "SpeculativeStreaming",
    // Stateful models need macOS 15 and iOS 18.
    platforms: [.macOS(.v15), .iOS(.v18)],
    products: products,
    dependencies: dependencies,
    targets: targets,
    swiftLanguageModes: [.v6]
)
