import { expect, test } from "vitest";
import { backendFacts, notifies } from "./backend-traits.js";

const specs = (...names: string[]) => names.map((name) => ({ name }));

test("storage has no notifications, unless a backend with peers is beside it", () => {
  for (const name of ["AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "INFINIA", "OBJ", "POSIX"]) {
    expect(notifies(specs(name)), name).toBe(false);
    expect(notifies(specs(name, "UCX")), name).toBe(true);
  }
  expect(notifies(specs("LIBFABRIC"))).toBe(true);
});

test("of a backend without a row nothing is assumed but notifications", () => {
  expect(backendFacts("OF_NO_ROW")).toMatchObject({
    notifies: true,
    reportsPeerDeath: false,
    files: false,
    devices: false,
  });
  expect(backendFacts("toString")).toBe(backendFacts("OF_NO_ROW"));
});
