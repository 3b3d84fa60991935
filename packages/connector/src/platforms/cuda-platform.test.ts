import { platformSuite } from "@kv/conformance/platform";
import { expect, test } from "vitest";
import { cudaPlatform } from "./cuda-platform.js";

platformSuite({ name: "cuda", create: () => cudaPlatform({ gpus: ["nvidia0"] }) });

test("is refused without a GPU, with a hint to use the cpu platform and the devices that there are", () => {
  expect(() => cudaPlatform({ gpus: [] })).toThrowError(
    expect.objectContaining({
      code: "KV_PLATFORM_UNSUPPORTED",
      message: expect.stringMatching(/\/dev\/nvidia0\. This machine has \d+ CPU cores and /),
      hint: expect.stringContaining('"cpu"'),
    }),
  );
});
