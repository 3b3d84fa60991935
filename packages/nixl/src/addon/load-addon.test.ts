import { KvError } from "@kv/interface";
import { afterEach, describe, expect, test, vi } from "vitest";
import { loadAddon } from "./load-addon.js";

afterEach(() => {
  vi.restoreAllMocks();
  vi.unstubAllEnvs();
});

describe.runIf(process.platform === "linux")("an addon that does not load", () => {
  function failure(header: object): KvError {
    vi.stubEnv("KV_NIXL_ADDON", "/nowhere/kv_nixl.node");
    vi.spyOn(process.report, "getReport").mockReturnValue({ header });
    try {
      loadAddon();
    } catch (error) {
      if (KvError.is(error, "KV_ADDON_NOT_FOUND")) return error;
    }
    throw new Error("the addon was loaded");
  }

  test("with glibc, the hint names the platform package", () => {
    const { message, hint } = failure({ glibcVersionRuntime: "2.36" });
    expect(message).toContain("/nowhere/kv_nixl.node");
    expect(hint).toContain(`install @kv/nixl-linux-${process.arch}-gnu`);
  });

  test("on musl, the error says so, and the hint does not name a package that cannot help", () => {
    const { message, hint } = failure({});
    expect(message).toContain("musl");
    expect(hint).toContain("glibc 2.28 or newer");
    expect(hint).not.toContain("@kv/nixl-");
  });

  test("with an older glibc, the error names its version", () => {
    const { message, hint } = failure({ glibcVersionRuntime: "2.17" });
    expect(message).toContain("glibc 2.17");
    expect(hint).toContain("RHEL 8");
  });
});
