import { vi } from "vitest";

// KV_PROPERTY_FIRST=1 stops at the first failing case, without shrinking it.
vi.mock("fast-check", async (original) => {
  const real = await original<typeof import("fast-check")>();
  const factor = Number(process.env["KV_PROPERTY_FACTOR"] ?? 1);
  const first = process.env["KV_PROPERTY_FIRST"] === "1";
  const assert = ((
    property: Parameters<typeof real.assert>[0],
    parameters?: { numRuns?: number },
  ) =>
    real.assert(property, {
      ...parameters,
      ...(first ? { endOnFailure: true } : {}),
      numRuns: Math.ceil((parameters?.numRuns ?? 100) * factor),
    })) as typeof real.assert;
  return { ...real, assert, default: { ...real.default, assert } };
});
