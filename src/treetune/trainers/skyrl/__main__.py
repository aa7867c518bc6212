from treetune.trainers.skyrl import main

main()
