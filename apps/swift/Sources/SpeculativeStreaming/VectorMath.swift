/// Eight numbers at a time, with arithmetic and integer operations only: comparisons and masks of Swift's SIMD
/// types are done lane by lane on some platforms.
enum VectorMath {
    static let width = 8
    typealias Lanes = SIMD8<Float>
    typealias Bits = SIMD8<Int32>

    /// Eight numbers at any address.
    @inline(__always)
    static func load(_ pointer: UnsafePointer<Float>) -> Lanes {
        UnsafeRawPointer(pointer).loadUnaligned(as: Lanes.self)
    }

    /// `sum + factor * lanes`, in one instruction where every processor of the platform has it.
    @inline(__always)
    static func sum(_ sum: Lanes, _ factor: Float, _ lanes: Lanes) -> Lanes {
        self.sum(sum, Lanes(repeating: factor), lanes)
    }

    @inline(__always)
    static func sum(_ sum: Lanes, _ factors: Lanes, _ lanes: Lanes) -> Lanes {
        #if arch(arm64)
            return sum.addingProduct(factors, lanes)
        #else
            return sum + factors * lanes
        #endif
    }

    /// u · row of `width` numbers, a multiple of 8.
    @inline(__always)
    static func dot(_ u: UnsafePointer<Float>, _ row: UnsafePointer<Float>, width: Int) -> Float {
        var lanes = Lanes(repeating: 0)
        for index in stride(from: 0, to: width, by: self.width) {
            lanes = sum(lanes, load(u + index), load(row + index))
        }
        return (lanes.lowHalf + lanes.highHalf).sum()
    }

    /// u · row for four rows that follow one another: their accumulators stay in registers.
    @inline(__always)
    static func fourDots(_ u: UnsafePointer<Float>, _ rows: UnsafePointer<Float>, width: Int) -> SIMD4<Float> {
        var (a, b, c, d) = (Lanes(repeating: 0), Lanes(repeating: 0), Lanes(repeating: 0), Lanes(repeating: 0))
        for index in stride(from: 0, to: width, by: self.width) {
            let factors = load(u + index)
            a = sum(a, factors, load(rows + index))
            b = sum(b, factors, load(rows + width + index))
            c = sum(c, factors, load(rows + 2 * width + index))
            d = sum(d, factors, load(rows + 3 * width + index))
        }
        let first = pairSums(a.lowHalf + a.highHalf, b.lowHalf + b.highHalf)
        let second = pairSums(c.lowHalf + c.highHalf, d.lowHalf + d.highHalf)
        return pairSums(first, second)
    }

    /// Sums of neighbours: two of the first, then two of the second.
    @inline(__always)
    private static func pairSums(_ first: SIMD4<Float>, _ second: SIMD4<Float>) -> SIMD4<Float> {
        let both = SIMD8(lowHalf: first, highHalf: second)
        return both.evenHalf + both.oddHalf
    }

    /// Whether the sign bit is set in every lane.
    @inline(__always)
    static func areAllNegative(_ bits: Bits) -> Bool {
        let four = bits.lowHalf & bits.highHalf
        let two = four.lowHalf & four.highHalf
        return two[0] & two[1] < 0
    }

    /// The larger of both in every lane, for numbers whose difference is a number.
    @inline(__always)
    static func larger(_ a: Lanes, _ b: Lanes) -> Lanes {
        let isLess = unsafeBitCast(a - b, to: Bits.self) &>> Bits(repeating: 31)  // all ones where a < b
        let (first, second) = (unsafeBitCast(a, to: Bits.self), unsafeBitCast(b, to: Bits.self))
        return unsafeBitCast(first ^ ((first ^ second) & isLess), to: Lanes.self)
    }

    /// e^x for x ≤ 0 to about two units in the last place, 0 below -87: x = n·ln 2 + r, a polynomial for e^r and
    /// n added to the exponent (Cody and Waite's reduction, Cephes' coefficients of `expf`).
    @inline(__always)
    static func exponential(_ x: Lanes) -> Lanes {
        // Adding 1.5·2^23 rounds to an integer without a conversion instruction.
        let magic = Lanes(repeating: 12_582_912)
        let shifted = x * Lanes(repeating: 1.442_695_04) + magic
        let n = shifted - magic
        let r = (x - n * Lanes(repeating: 0.693_359_375)) + n * Lanes(repeating: 2.121_944_4e-4)
        var p = Lanes(repeating: 1.987_569_1e-4)
        p = p * r + Lanes(repeating: 1.398_199_9e-3)
        p = p * r + Lanes(repeating: 8.333_452e-3)
        p = p * r + Lanes(repeating: 4.166_579_6e-2)
        p = p * r + Lanes(repeating: 1.666_666_5e-1)
        p = p * r + Lanes(repeating: 5.000_000_1e-1)
        p = p * (r * r) + r + Lanes(repeating: 1)
        let exponent = unsafeBitCast(shifted, to: Bits.self) &- unsafeBitCast(magic, to: Bits.self)
        let bits = unsafeBitCast(p, to: Bits.self) &+ (exponent &<< Bits(repeating: 23))
        // Below -87 the exponent has left its range; such a term is nothing beside e^0.
        let isTiny = unsafeBitCast(x + Lanes(repeating: 87), to: Bits.self) &>> Bits(repeating: 31)
        return unsafeBitCast(bits & (isTiny ^ Bits(repeating: -1)), to: Lanes.self)
    }

    /// e^x of numbers ≤ 0, in place.
    static func exponentials(_ values: UnsafeMutableBufferPointer<Float>) {
        guard let start = values.baseAddress else { return }
        var index = 0
        while index + width <= values.count {
            let result = exponential(load(start + index))
            UnsafeMutableRawPointer(start + index).storeBytes(of: result, as: Lanes.self)
            index += width
        }
        while index < values.count {
            values[index] = exponential(Lanes(repeating: values[index]))[0]
            index += 1
        }
    }

    /// Largest of a row's numbers.
    static func largest(_ values: UnsafeBufferPointer<Float>) -> Float {
        guard let start = values.baseAddress else { return -.infinity }
        var result = start[0]
        var index = 0
        if values.count >= width {
            var lanes = load(start)
            index = width
            while index + width <= values.count {
                lanes = larger(lanes, load(start + index))
                index += width
            }
            for lane in 0..<width { result = max(result, lanes[lane]) }
        }
        while index < values.count {
            result = max(result, start[index])
            index += 1
        }
        return result
    }

    /// Σ exp(value - largest): float32 terms, summed in double precision every 512 numbers.
    static func sumOfExponentials(_ values: UnsafeBufferPointer<Float>, minus largest: Float) -> Double {
        guard let start = values.baseAddress else { return 0 }
        let shift = Lanes(repeating: largest)
        var total = 0.0
        var index = 0
        while index + width <= values.count {
            var lanes = Lanes(repeating: 0)
            // Float32 partial sums stay short, so that they lose nothing that matters.
            let end = min(index + 512, values.count)
            while index + width <= end {
                lanes += exponential(load(start + index) - shift)
                index += width
            }
            for lane in 0..<width { total += Double(lanes[lane]) }
        }
        while index < values.count {
            total += Double(exponential(Lanes(repeating: start[index]) - shift)[0])
            index += 1
        }
        return total
    }
}

extension VectorMath.Lanes {
    var largest: Float {
        var result = self[0]
        for lane in 1..<VectorMath.width { result = Swift.max(result, self[lane]) }
        return result
    }
}
