import {
  itIsFoundByItsNames,
  itRefusesWhatDoesNotFit,
} from "@kv/testing/scenarios/connector-module";
import { expect, test } from "vitest";
import { PULL_CONNECTOR_NAMES, pullConnector, registerPullConnector } from "./index.js";

itIsFoundByItsNames(
  pullConnector,
  PULL_CONNECTOR_NAMES,
  registerPullConnector,
  () => import("./index.js"),
);
itRefusesWhatDoesNotFit(pullConnector);

test("S3.11: NixlConnector keeps meaning pull", () => {
  expect(PULL_CONNECTOR_NAMES).toContain("NixlConnector");
});
