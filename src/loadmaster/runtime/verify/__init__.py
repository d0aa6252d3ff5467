"""Does a placed model give the numbers of the model itself? One batch runs both ways, is compared op by op
(or module by module under the hook engine), and the first difference is named. The front door is
`compare_batch` in `verification`. It may import both engines and the transport below them, `modules`,
`graph` and `core`.
"""
