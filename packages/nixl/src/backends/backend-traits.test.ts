import { expect, test } from "vitest";
import { backendTraits, notifies } from "./backend-traits.js";

const specs = (...names: string[]) => names.map((name) => ({ name }));

test("storage backends have no notifications, unless another backend has peers", () => {
  for (const name of ["AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "INFINIA", "OBJ", "POSIX"]) {
    expect(notifies(specs(name)), name).toBe(false);
    expect(notifies(specs(name, "UCX")), name).toBe(true);
  }
  expect(notifies(specs("LIBFABRIC"))).toBe(true);
});

test("an unknown backend is assumed to have notifications, and no other trait", () => {
  expect(backendTraits("OF_NO_ROW")).toMatchObject({
    notifies: true,
    reportsPeerDeath: false,
    files: false,
    devices: false,
  });
  expect(backendTraits("toString")).toBe(backendTraits("OF_NO_ROW"));
});
