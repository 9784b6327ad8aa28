# SPDX-License-Identifier: Apache-2.0
"""`farandole run` and farandole.run(), which start the ranks of a job."""
