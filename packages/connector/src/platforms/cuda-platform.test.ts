import { platformSuite } from "@kv/conformance/platform";
import { expect, test } from "vitest";
import { cudaPlatform } from "./cuda-platform.js";

platformSuite({ name: "cuda", create: () => cudaPlatform({ gpus: () => ["nvidia0"] }) });

test("is refused without a GPU, with a hint to use the cpu platform", () => {
  expect(() => cudaPlatform({ gpus: () => [] })).toThrowError(
    expect.objectContaining({
      code: "KV_PLATFORM_UNSUPPORTED",
      message: expect.stringContaining("/dev/nvidia0"),
      hint: expect.stringContaining('"cpu"'),
    }),
  );
});
