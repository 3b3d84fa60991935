import { expectThrown } from "@kv/conformance/expect-error";
import { afterEach, describe, expect, test, vi } from "vitest";
import { loadAddon } from "./load-addon.js";

afterEach(() => {
  vi.restoreAllMocks();
  vi.unstubAllEnvs();
});

describe.runIf(process.platform === "linux")("an addon that does not load", () => {
  test.each([
    [
      "with glibc, the hint names the platform package",
      { glibcVersionRuntime: "2.36" },
      "/nowhere/kv_nixl.node",
      `install @kv/nixl-linux-${process.arch}-gnu`,
    ],
    [
      "on musl, the error says so, and the hint does not name a package that cannot help",
      {},
      "musl",
      "glibc 2.28 or newer",
    ],
    [
      "with an older glibc, the error names its version",
      { glibcVersionRuntime: "2.17" },
      "glibc 2.17",
      "RHEL 8",
    ],
  ])("%s", (_, header, why, what) => {
    vi.stubEnv("KV_NIXL_ADDON", "/nowhere/kv_nixl.node");
    vi.spyOn(process.report, "getReport").mockReturnValue({ header });
    const { message, hint } = expectThrown(loadAddon, "KV_ADDON_NOT_FOUND");
    expect(message).toContain(why);
    expect(hint).toContain(what);
    expect(hint?.includes("@kv/nixl-")).toBe(what.startsWith("install"));
  });
});
