/// IEEE half precision as bits. `Float16` does not exist on Intel Macs, and converting in bulk by integer
/// operations is quick everywhere.
public enum Half {
    /// The value of a half-precision number.
    @inlinable
    public static func float(_ bits: UInt16) -> Float {
        let magnitude = UInt32(bits & 0x7fff)
        let sign = UInt32(bits & 0x8000) << 16
        // Moving exponent and fraction into a float's places leaves the exponent's bias off by 112; the
        // product corrects it, for subnormal numbers too.
        let scaled = Float(bitPattern: magnitude << 13) * 0x1p112
        let finite = scaled.bitPattern
        let special = magnitude >= 0x7c00 ? finite | 0x7f80_0000 : finite
        return Float(bitPattern: special | sign)
    }

    /// The nearest half-precision number, ties to even.
    public static func bits(_ value: Float) -> UInt16 {
        let sign = UInt16(truncatingIfNeeded: value.bitPattern >> 16) & 0x8000
        let magnitude = Float(bitPattern: value.bitPattern & 0x7fff_ffff)
        if magnitude.isNaN { return sign | 0x7e00 }
        if magnitude >= 65520 { return sign | 0x7c00 }
        if magnitude < 0x1p-14 {  // subnormal: counted in units of 2^-24
            return sign | UInt16((magnitude * 0x1p24).rounded(.toNearestOrEven))
        }
        let rounded = magnitude.bitPattern &+ 0xfff &+ ((magnitude.bitPattern >> 13) & 1)
        return sign | UInt16(truncatingIfNeeded: (rounded &- (112 << 23)) >> 13)
    }

    /// Converts `source` into `target` of the same length.
    public static func convert(_ source: UnsafeBufferPointer<UInt16>, into target: UnsafeMutableBufferPointer<Float>) {
        precondition(source.count == target.count, "both buffers must have the same length")
        for index in 0..<source.count { target[index] = float(source[index]) }
    }
}
