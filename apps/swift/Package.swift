// swift-tools-version: 6.0
import PackageDescription

// Core ML and SwiftUI exist on Apple platforms only. This manifest is a program that runs on the machine that
// builds: on Linux it leaves out what needs them and adds the stand-in for Core ML that the tests run on.
#if os(Linux)
    let isLinux = true
#else
    let isLinux = false
#endif

var dependencies: [Package.Dependency] = []
var coreML: [Target.Dependency] = ["SpeculativeStreaming"]
var command: [Target.Dependency] = ["SpeculativeStreaming", "SpeculativeStreamingCoreML"]
var products: [Product] = [
    .library(name: "SpeculativeStreaming", targets: ["SpeculativeStreaming"]),
    .library(name: "SpeculativeStreamingCoreML", targets: ["SpeculativeStreamingCoreML"]),
    .executable(name: "ss-stream", targets: ["ss-stream"]),
]
var targets: [Target] = []

if isLinux {
    coreML.append("CoreML")
    targets.append(.target(name: "CoreML", path: "Tests/Support/CoreML", exclude: ["README.md"]))
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
    .target(name: "SpeculativeChatModel", dependencies: ["SpeculativeStreaming"]),
    .executableTarget(name: "ss-stream", dependencies: command),
    .testTarget(
        name: "SpeculativeStreamingTests", dependencies: ["SpeculativeStreaming", "SpeculativeChatModel"],
        resources: [.copy("Resources")]),
    .testTarget(name: "StreamCommandTests", dependencies: ["SpeculativeStreaming", "ss-stream"]),
    .testTarget(
        name: "SpeculativeStreamingCoreMLTests",
        dependencies: coreML + ["SpeculativeStreamingCoreML"],
        resources: [.copy("Resources")]),
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
