import { expect, test } from "vitest";
import { lastLines } from "./last-lines.js";

test("UCX's reason is kept before the errors that follow from it", () => {
  const output = [
    "[1795342071.646355] [vm:8334 :0]     ucp_context.c:1508 UCX  WARN  transport 'foo' is not available, please use one or more of: cma, tcp",
    "[1795342071.646759] [vm:8334 :0]     ucp_context.c:1770 UCX  ERROR no usable transports/devices",
    "E1122 10:07:51.647353    8345 backend_plugin.h:102] Failed to create engine",
    "E1122 10:07:51.647869    8345 nixl_agent.cpp:342] createBackend: backend creation failed for 'UCX'",
  ];
  expect(lastLines(`${output.join("\n")}\n`)).toEqual(output);
});

test("leaves out routine lines and protocol tables", () => {
  const quiet = [
    "[1.5] [vm:1 :0] ucp.c:1 UCX  INFO  cfg",
    "| a | b |",
    "[1.5] [vm:1:0] +---+----+",
    "I1122 10:07:51.6 1 nixl.cpp:1] up",
    " ",
  ];
  expect(lastLines(quiet.join("\n"))).toEqual([]);
  expect(lastLines([...quiet, "last"].join("\n"))).toEqual(["last"]);
});

test("limits lines and their length, removes colours, and shows other control characters", () => {
  const many = Array.from({ length: 100 }, (_, index) => `line ${index}`);
  expect(lastLines(many.join("\n"))).toEqual(many.slice(-6));
  expect(lastLines("x".repeat(5000))).toEqual([`${"x".repeat(300)}…`]);
  expect(lastLines("\u001b[32mgreen\u0007\u202e\u001b[0m\r\nnext\u0000")).toEqual([
    "green\\u0007\\u202e",
    "next\\u0000",
  ]);
});
