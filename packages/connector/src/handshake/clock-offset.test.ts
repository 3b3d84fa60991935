import type { KvError } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { clockOffset } from "./connector-handshake.js";

describe("clockOffset", () => {
  it("uses the sample with the lowest round trip, at any position", () => {
    const clock = clockOffset([
      { sentAtMs: 0, receivedAtMs: 80, remoteSeconds: 10 },
      { sentAtMs: 100, receivedAtMs: 104, remoteSeconds: 10.102 },
      { sentAtMs: 200, receivedAtMs: 230, remoteSeconds: 10.2 },
    ]);
    expect(clock.rttMs).toBe(4);
    expect(clock.offsetMs).toBeCloseTo(10_000, 6);
    expect(clock.earliestLocalMs(11)).toBeCloseTo(998, 6);
  });

  it("earliestLocalMs is never later than the true time, however asymmetric the network delays are", () => {
    fc.assert(
      fc.property(
        fc.double({ min: -1e6, max: 1e6, noNaN: true }),
        fc.array(fc.tuple(fc.integer({ min: 0, max: 500 }), fc.integer({ min: 0, max: 500 })), {
          minLength: 1,
          maxLength: 5,
        }),
        (offset, ways) => {
          const samples = ways.map(([out, back], i) => {
            const sentAtMs = i * 2000;
            return {
              sentAtMs,
              receivedAtMs: sentAtMs + out + back,
              remoteSeconds: (sentAtMs + out + offset) / 1000,
            };
          });
          const clock = clockOffset(samples);
          const trueLocalMs = 123_456;
          const remote = (trueLocalMs + offset) / 1000;
          expect(clock.earliestLocalMs(remote)).toBeLessThanOrEqual(trueLocalMs + 1e-3);
          expect(clock.earliestLocalMs(remote)).toBeGreaterThanOrEqual(
            trueLocalMs - clock.rttMs - 1e-3,
          );
          expect(Math.abs(remote * 1000 - clock.offsetMs - trueLocalMs)).toBeLessThanOrEqual(
            clock.rttMs / 2 + 1e-3,
          );
        },
      ),
    );
  });

  it("refuses an empty list, a clock that is not finite, and a reply received before its request was sent", () => {
    const bad = [
      [],
      [{ sentAtMs: 0, receivedAtMs: 1, remoteSeconds: Number.NaN }],
      [{ sentAtMs: 0, receivedAtMs: 1, remoteSeconds: Number.POSITIVE_INFINITY }],
      [{ sentAtMs: 5, receivedAtMs: 4, remoteSeconds: 1 }],
    ];
    for (const samples of bad) {
      expect(() => clockOffset(samples)).toThrow(
        expect.objectContaining({ code: "KV_WIRE_MALFORMED" }) as KvError,
      );
    }
  });
});
