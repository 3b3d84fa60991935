// Before the suites: tests of programs start what is built, so the build must be that of the sources.
import { bundles } from "./setup.mjs";

export const setup = bundles;
