import { expect, test } from "vitest";
import { workerSettings } from "./limits-share.js";

test("of several workers, each gets its share of the limits that are set, and room for one body", () => {
  const { limits, admin } = workerSettings(
    {
      limits: {
        connections: 5,
        requestsPerClient: 4,
        bodyLengthBytes: 1000,
        bodiesLengthBytes: 3000,
      },
      admin: { port: 1 },
    },
    4,
  );
  expect(limits).toEqual({
    connections: 2,
    requestsPerClient: 1,
    bodyLengthBytes: 1000,
    bodiesLengthBytes: 1000,
  });
  expect(admin).toBeUndefined();
});
