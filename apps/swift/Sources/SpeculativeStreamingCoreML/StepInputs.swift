#if canImport(CoreML)
    import CoreML
    import SpeculativeStreaming

    /// Rows of the previous step that the next one moves to their slots (lazy commit).
    package struct PendingCommit: Equatable {
        /// Slot of the first row.
        package var slot = 0
        /// Node ids of the accepted path and their rows among the kept nodes.
        package var nodes: [Int] = []
        package var rows: [Int] = []

        package init(slot: Int = 0, nodes: [Int] = [], rows: [Int] = []) {
            self.slot = slot
            self.nodes = nodes
            self.rows = rows
        }
    }

    /// The inputs of a step function (`ss_convert/graph/interface.py`), in memory that every step reuses.
    package final class StepInputs {
        package let features: any MLFeatureProvider
        private let size: Int
        private let context: Int
        private let tokens: MLMultiArray
        private let positions: MLMultiArray
        private let parents: MLMultiArray
        private let mask: MLMultiArray
        private let commitPosition: MLMultiArray
        private let commitNodes: MLMultiArray
        private let commitRows: MLMultiArray?

        /// - Parameter gated: whether main rows attend to their streams, which adds a gate that is open here.
        package init(_ limits: StepLimits, gated: Bool) throws {
            size = limits.numNodes
            context = limits.context
            tokens = try .zeros([1, size], .int32)
            positions = try .zeros([size], .int32)
            parents = try .zeros([size], .int32)
            mask = try .zeros([size, context + size], .float16)
            commitPosition = try .zeros([1], .int32)
            commitNodes = try .zeros([size], .int32)
            commitRows = limits.numKept < size ? try .zeros([size], .int32) : nil
            var dictionary: [String: Any] = [
                "tokens": tokens, "positions": positions, "parents": parents, "mask": mask,
                "commit_position": commitPosition, "commit_nodes": commitNodes,
            ]
            if let commitRows { dictionary["commit_rows"] = commitRows }
            if gated { dictionary["stream_gate"] = try MLMultiArray.zeros([1], .float16) }
            features = try MLDictionaryFeatureProvider(dictionary: dictionary)
        }

        /// Fills all inputs for `tree` below `length` committed positions.
        package func fill(_ tree: DraftTree, length: Int, pending: PendingCommit) {
            // Padding repeats the root: any other id might have an all-zero embedding, a 0/0 in a norm.
            tokens.write(padded(tree.tokens, tree.tokens[0]))
            positions.write(padded(tree.depths.map { length + $0 }, length))
            parents.write(padded(tree.parents, -1))
            commitPosition.write(CollectionOfOne(Int32(pending.slot)))
            commitNodes.write(padded(pending.nodes, -1))
            commitRows?.write(padded(pending.rows, -1))
            fillMask(tree, length: length)
        }

        /// A real node sees the committed slots, its ancestors and itself; padding sees itself only.
        private func fillMask(_ tree: DraftTree, length: Int) {
            let context = context
            mask.writeHalfRows { row, columns in
                columns.update(repeating: AdditiveMask.hidden)
                guard row < tree.count else {
                    columns[context + row] = AdditiveMask.visible
                    return
                }
                columns[..<length].update(repeating: AdditiveMask.visible)
                var node = row
                while node >= 0 {
                    columns[context + node] = AdditiveMask.visible
                    node = tree.parents[node]
                }
            }
        }

        private func padded(_ values: [Int], _ filler: Int) -> [Int32] {
            (0..<size).map { Int32($0 < values.count ? values[$0] : filler) }
        }
    }

    /// The inputs of a prefill function, in memory that every chunk reuses.
    final class PrefillInputs {
        let features: any MLFeatureProvider
        private let chunk: Int
        private let context: Int
        private let tokens: MLMultiArray
        private let position: MLMultiArray
        private let mask: MLMultiArray

        init(chunk: Int, context: Int) throws {
            self.chunk = chunk
            self.context = context
            tokens = try .zeros([1, chunk], .int32)
            position = try .zeros([1], .int32)
            mask = try .zeros([chunk, context + chunk], .float16)
            features = try MLDictionaryFeatureProvider(
                dictionary: ["tokens": tokens, "position": position, "mask": mask])
        }

        /// Fills all inputs for up to `chunk` prompt tokens behind `length` committed positions.
        func fill(_ part: ArraySlice<Int>, length: Int) {
            let padding = repeatElement(part[part.endIndex - 1], count: chunk - part.count)
            tokens.write((Array(part) + padding).map { Int32($0) })
            position.write(CollectionOfOne(Int32(length)))
            let context = context
            mask.writeHalfRows { row, columns in
                columns.update(repeating: AdditiveMask.hidden)
                columns[..<length].update(repeating: AdditiveMask.visible)
                columns[context...(context + row)].update(repeating: AdditiveMask.visible)
            }
        }
    }
#endif
