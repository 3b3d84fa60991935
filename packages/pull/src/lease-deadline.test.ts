import { describe, expect, it } from "vitest";
import { type LeaseDeadlineOptions, leaseDeadlineMs } from "./lease-deadline.js";

const base: LeaseDeadlineOptions = {
  expirySeconds: 130,
  clock: { earliestLocalMs: (seconds) => seconds * 1000 - 100_000 },
  seenAtMs: 2000,
  leaseMs: 30_000,
  extensionMs: 20_000,
  marginMs: 5000,
  heartbeatsAtMs: [],
};

describe("leaseDeadlineMs", () => {
  it("converts the announced expiry with the clock offset, and subtracts the margin", () => {
    expect(leaseDeadlineMs(base)).toBe(25_000);
  });

  it("without an announced expiry, counts a lease from the time the request was first seen", () => {
    expect(leaseDeadlineMs({ ...base, expirySeconds: undefined })).toBe(27_000);
  });

  it("a heartbeat extends the deadline and never shortens it", () => {
    expect(leaseDeadlineMs({ ...base, heartbeatsAtMs: [20_000] })).toBe(35_000);
    expect(leaseDeadlineMs({ ...base, heartbeatsAtMs: [5000] })).toBe(25_000);
    expect(leaseDeadlineMs({ ...base, heartbeatsAtMs: [5000, 24_000, 38_000, 52_000] })).toBe(
      67_000,
    );
  });

  it("a heartbeat after the deadline does not extend it", () => {
    expect(leaseDeadlineMs({ ...base, heartbeatsAtMs: [25_001] })).toBe(25_000);
    expect(leaseDeadlineMs({ ...base, heartbeatsAtMs: [20_000, 36_000, 37_000] })).toBe(35_000);
  });
});
