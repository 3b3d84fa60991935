import { vi } from "vitest";

// Every property of fast-check so many times longer, whatever number of runs it asks for itself. KV_PROPERTY_FIRST=1: the first case that
// fails is enough, no smaller one is looked for.
vi.mock("fast-check", async (original) => {
  const real = await original<typeof import("fast-check")>();
  const factor = Number(process.env["KV_PROPERTY_FACTOR"] ?? 1);
  const first = process.env["KV_PROPERTY_FIRST"] === "1";
  const assert = ((property: Parameters<typeof real.assert>[0], parameters?: { numRuns?: number }) =>
    real.assert(property, {
      ...parameters,
      ...(first ? { endOnFailure: true } : {}),
      numRuns: Math.ceil((parameters?.numRuns ?? 100) * factor),
    })) as typeof real.assert;
  return { ...real, assert, default: { ...real.default, assert } };
});
