import { describe, expect, test } from "vitest";
import { realHost } from "../../host.js";
import type { MissingPart } from "../../library/missing-parts.js";
import { gpuMemoryChecks } from "./gpu-memory.js";

const LIBRARY = "/cache/nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so";
const FOLDERS: Readonly<Record<string, readonly string[]>> = {
  "/dev": ["null", "nvidia0", "nvidia1", "nvidiactl"],
  "/cache/nixl": [".nixl_cu12.mesonpy.libs", "nixl_cu12.libs"],
  "/cache/nixl/nixl_cu12.libs/ucx": [
    "libucm_cuda.so.0.0.0",
    "libuct_cma.so.0.0.0",
    "libuct_cuda.so.0.0.0",
  ],
};

async function look({
  folders = FOLDERS,
  environment = {},
  lacks = [],
}: {
  folders?: Readonly<Record<string, readonly string[]>>;
  environment?: Readonly<Record<string, string>>;
  lacks?: MissingPart[];
} = {}) {
  const examined: string[] = [];
  const checks = await gpuMemoryChecks({
    host: { ...realHost(), names: (folder) => folders[folder] ?? [] },
    environment,
    libraryPath: LIBRARY,
    missing: async (file) => {
      examined.push(file);
      return lacks;
    },
  });
  return { checks, examined };
}

describe("GPU memory through UCX", () => {
  test("no check on a machine without a GPU", async () => {
    expect(await look({ folders: { ...FOLDERS, "/dev": ["null"] } })).toEqual({
      checks: [],
      examined: [],
    });
  });

  test("is ok when UCX's CUDA module loads", async () => {
    const { checks, examined } = await look();
    expect(examined).toEqual(["/cache/nixl/nixl_cu12.libs/ucx/libuct_cuda.so.0.0.0"]);
    expect(checks).toMatchObject([
      { id: "library.gpu-memory", status: "ok", found: expect.stringContaining("2 NVIDIA") },
    ]);
  });

  test("warns when a container lacks the driver's libraries", async () => {
    const { checks } = await look({ lacks: [{ kind: "library", name: "libnvidia-ml.so.1" }] });
    expect(checks).toMatchObject([
      {
        status: "warn",
        found: expect.stringContaining("lacks libnvidia-ml.so.1"),
        fix: expect.stringContaining("compute,utility"),
      },
    ]);
  });

  test.each([
    ["rc,ud,sm", "warn"],
    ["^cuda", "warn"],
    ["^ib,cuda_copy", "warn"],
    ["rc,cuda", "ok"],
    ["rc,sm,cuda_copy,cuda_ipc", "ok"],
    ["rc,sm,cuda_copy", "warn"],
    ["all", "ok"],
    ["^cuda_ipc", "warn"],
  ])("UCX_TLS=%s: %s", async (transports, status) => {
    const { checks } = await look({ environment: { UCX_TLS: transports } });
    expect(checks[0]).toMatchObject({ id: "library.gpu-memory", status });
  });

  test("a UCX that is not from the wheel is only noted", async () => {
    const { checks } = await look({ folders: { "/dev": ["nvidia0"] } });
    expect(checks).toMatchObject([{ status: "note" }]);
  });
});
