import { expect, test } from "vitest";
import { requestedBackends } from "./variables.js";

test("reports the selection with its source, and repeats it in probes", () => {
  const byDefault = requestedBackends({ NIXL_BACKEND: " " }, {});
  expect(byDefault.check).toMatchObject({
    status: "note",
    found: "UCX, by default",
    details: { backends: ["UCX"], source: "the default" },
  });
  expect(byDefault.selectInProbe("UCX")).toEqual({ args: [], env: {} });

  const byVariable = requestedBackends({ VLLM_NIXL_BACKEND: "LIBFABRIC,UCX" }, {});
  expect(byVariable.check).toMatchObject({
    found: "LIBFABRIC, UCX, from VLLM_NIXL_BACKEND",
    details: { backends: ["LIBFABRIC", "UCX"], source: "VLLM_NIXL_BACKEND" },
  });
  expect(byVariable.selectInProbe("UCX")).toEqual({ args: [], env: { VLLM_NIXL_BACKEND: "UCX" } });

  const asked = requestedBackends({ NIXL_BACKEND: "LIBFABRIC" }, { backends: ["UCX"] });
  expect(asked.check.found).toBe("UCX, from the option --backend");
  expect(asked.selectInProbe("UCX")).toEqual({ args: ["UCX"], env: {} });
});

test("an invalid name fails, with an example of a valid one", () => {
  const { names, check } = requestedBackends({ NIXL_BACKEND: "no backend!" }, {});
  expect(names).toEqual([]);
  expect(check).toMatchObject({ status: "fail", fix: "such as UCX or LIBFABRIC" });
});
