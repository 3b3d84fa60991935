import { expect, test } from "vitest";
import { choiceOf } from "./requested-backends.js";

test("the choice is told with its source, and handed on as it was made", () => {
  const byDefault = choiceOf({ NIXL_BACKEND: " " }, {});
  expect(byDefault.check).toMatchObject({
    status: "note",
    found: "UCX, by default",
    details: { backends: ["UCX"], source: "the default" },
  });
  expect(byDefault.askFor("UCX")).toEqual({ args: [], env: {} });

  const byVariable = choiceOf({ VLLM_NIXL_BACKEND: "LIBFABRIC,UCX" }, {});
  expect(byVariable.check).toMatchObject({
    found: "LIBFABRIC, UCX, from VLLM_NIXL_BACKEND",
    details: { backends: ["LIBFABRIC", "UCX"], source: "VLLM_NIXL_BACKEND" },
  });
  expect(byVariable.askFor("UCX")).toEqual({ args: [], env: { VLLM_NIXL_BACKEND: "UCX" } });

  const asked = choiceOf({ NIXL_BACKEND: "LIBFABRIC" }, { backends: ["UCX"] });
  expect(asked.check.found).toBe("UCX, from the option --backend");
  expect(asked.askFor("UCX")).toEqual({ args: ["UCX"], env: {} });
});

test("what is no name of a backend fails, with what would be one", () => {
  const { backends, check } = choiceOf({ NIXL_BACKEND: "no backend!" }, {});
  expect(backends).toEqual([]);
  expect(check).toMatchObject({ status: "fail", fix: "such as UCX or LIBFABRIC" });
});
